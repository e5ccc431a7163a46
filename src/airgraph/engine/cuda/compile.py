"""Triton kernels: compiled by other processes (build_server.py), equal ones once (cubins.py), launched through the driver.

Triton's own launcher is C code that it builds with the system's compiler for every signature, and its dispatch takes some
30 µs of Python per launch. Here a launch is one call of `cuLaunchKernelEx` with arguments that were laid out before.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from airgraph.disk_cache import Key
from airgraph.engine.cuda.build_server import build
from airgraph.engine.cuda.cubins import found, kept, key_of
from airgraph.engine.cuda.kernel_source import KernelSource
from airgraph.engine.cuda.triton_build import ALIGNMENT, Binary, KernelVariant
from airgraph.errors import EngineError

THREADS = min(16, os.cpu_count() or 1)  # which wait for the processes that compile
_futures: dict[KernelVariant, Future[Binary]] = {}
_lock = threading.Lock()


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="airgraph-triton")


def request(variant: KernelVariant, capability: int) -> Future[Binary]:
    """The compiled kernel, now or later; equal kernels are compiled once."""
    with _lock:
        future = _futures.get(variant)
        if future is None:
            future = _futures[variant] = pool().submit(kept_or_compiled, variant, capability)
        return future


def kept_or_compiled(variant: KernelVariant, capability: int) -> Binary:
    """From the compilation cache, or compiled and kept there."""
    return kept(variant_key(variant, capability), lambda: build(variant, capability))


def variant_key(variant: KernelVariant, capability: int) -> Key:
    fields = {name: str(value) for name, value in vars(variant).items()}
    return key_of({**fields, "capability": str(capability)})


# -- the driver -----------------------------------------------------------------------------------------------------
class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int64 * 8)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PLAIN_SHARED = 48 << 10
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{what} failed: {(text.value or b'unknown error').decode()} ({status})")


@cache
def primary_context(index: int) -> ctypes.c_void_p:
    """The context that PyTorch uses on this device; it stays until the process ends."""
    context = ctypes.c_void_p()
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "finding the context")
    return context


def enter_context(index: int) -> None:
    """The driver's calls need the device's context in their thread. PyTorch makes it current when it first calls CUDA
    there, and it need not have done so: memory may come from its cache, in autograd's threads as in a server's."""
    check(driver().cuCtxSetCurrent(primary_context(index)), "entering the context")


class LoadedKernel:
    """A kernel on one device."""

    def __init__(self, binary: Binary, device: torch.device) -> None:
        self.binary, self.index = binary, device.index
        module, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            enter_context(self.index)
            check(driver().cuModuleLoadData(ctypes.byref(module), binary.code), "loading a kernel")
            name = binary.name.encode()
            check(driver().cuModuleGetFunction(ctypes.byref(self.handle), module, name), "finding a kernel")
            if binary.shared > PLAIN_SHARED:
                check(driver().cuFuncSetAttribute(self.handle, DYNAMIC_SHARED, binary.shared), "shared memory")
        self.module = module


_functions: dict[tuple[KernelVariant | str, torch.device], LoadedKernel] = {}  # by what they are of, or by digest


def function(variant: KernelVariant, device: torch.device) -> LoadedKernel:
    known = _functions.get((variant, device))
    if known is None:
        major, minor = torch.cuda.get_device_capability(device)
        known = loaded(variant, device, request(variant, 10 * major + minor).result())
    return known


def kept_function(digest: str, device: torch.device) -> LoadedKernel | None:
    """A kernel by its digest, if its compiled code is at hand."""
    known = _functions.get((digest, device))
    if known is None:
        code = found(digest)
        known = None if code is None else loaded(digest, device, Binary.from_bytes(code))
    return known


def loaded(key: KernelVariant | str, device: torch.device, binary: Binary) -> LoadedKernel:
    with _lock:
        return _functions.setdefault((key, device), LoadedKernel(binary, device))


class Launch:
    """A kernel with its arguments laid out: `pointers` are set before each launch, sizes and grid once."""

    def __init__(self, function: LoadedKernel, pointers: int, sizes: Sequence[int], grid: int) -> None:
        self.function, self.count = function, pointers
        self.cells = (ctypes.c_int64 * (pointers + len(sizes) + 2))(*[0] * pointers, *sizes, 0, 0)
        start = ctypes.addressof(self.cells)
        self.params = (ctypes.c_void_p * len(self.cells))(*(start + 8 * i for i in range(len(self.cells))))
        binary = function.binary
        self.attribute = LaunchAttribute(PROGRAMMATIC, 0, (ctypes.c_int64 * 8)(1))
        attributes = ctypes.addressof(self.attribute)
        self.config = LaunchConfig(grid, 1, 1, 32 * binary.warps, 1, 1, binary.shared, None, attributes, 0)
        self.grid = grid
        self.arguments = (ctypes.byref(self.config), function.handle, self.params, None)

    def __call__(self, pointers: Iterable[int], stream: int, ahead: bool = True) -> None:
        """`ahead`: it may begin before the kernel in front is done, and wait for that by itself. The kernel's device need
        not be the current one."""
        if not self.grid:
            return
        if torch.cuda.current_device() != self.function.index:
            with torch.cuda.device(self.function.index):
                self(pointers, stream, ahead)
            return
        for i, p in enumerate(pointers):
            self.cells[i] = p
        self.config.stream = stream
        # Outside of a graph a kernel in front may be one that writes weights, which others load ahead.
        self.config.attribute_count = int(
            ahead and self.function.binary.early and torch.cuda.is_current_stream_capturing()
        )
        status = driver().cuLaunchKernelEx(*self.arguments)
        if status == NO_CONTEXT:
            enter_context(self.function.index)
            status = driver().cuLaunchKernelEx(*self.arguments)
        check(status, "launching a kernel")


def variant(source: KernelSource, aligned: tuple[bool, ...], wide: bool) -> KernelVariant:
    return KernelVariant(
        source.text,
        tuple(source.signature.items()),
        tuple(source.constants.items()),
        source.warps,
        aligned,
        wide,
        source.checks,
        source.fuses,
    )


def plain_variant(source: KernelSource) -> KernelVariant:
    """For memory that is aligned and indices of 32 bits."""
    return variant(source, (True,) * pointers(source), wide=False)


def pointers(source: KernelSource) -> int:
    return sum(t.startswith("*") for t in source.signature.values())


class DriverKernels:
    """Kernels on one GPU (executable.Kernels)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.variants: list[KernelVariant] = []
        self.kept: list[str] = []  # digests of those that a program was kept with

    @property
    def capability(self) -> int:
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        """Compiling begins; launches wait for it. (What was compiled before is read in a fraction of a millisecond, less
        than another thread takes.)"""
        self.kept = [source.digest for source in sources if source.digest is not None]
        self.variants = [plain_variant(source) for source in sources if source.digest is None]
        for one in self.variants:
            request(one, self.capability)

    def digest(self, source: KernelSource) -> str:
        """Of its key in the compilation cache."""
        return source.digest or variant_key(plain_variant(source), self.capability).digest

    def binaries(self) -> dict[str, bytes]:
        """The kernels that were prepared, by the digests of their keys in the compilation cache."""
        known = {digest: code for digest in dict.fromkeys(self.kept) if (code := found(digest)) is not None}
        return known | {
            variant_key(one, self.capability).digest: request(one, self.capability).result().to_bytes()
            for one in dict.fromkeys(self.variants)
        }

    def function(self, source: KernelSource, alignment: tuple[bool, ...], wide: bool) -> LoadedKernel:
        known = None
        if source.digest is not None and all(alignment) and not wide:
            known = kept_function(source.digest, self.device)
        return known or function(variant(source, alignment, wide), self.device)

    def bind(
        self, source: KernelSource, sizes: Sequence[int], grid: int, wide: bool
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        index = self.device.index
        aligned = (True,) * pointers(source)
        launches: dict[tuple[bool, ...], Launch] = {}

        def launch(alignment: tuple[bool, ...]) -> Launch:
            kernel = self.function(source, alignment, wide)
            launches[alignment] = Launch(kernel, len(alignment), sizes, grid)
            return launches[alignment]

        plain = launch(aligned)

        def run(tensors: Sequence[torch.Tensor]) -> None:
            addresses = [t.data_ptr() for t in tensors]
            one = plain
            if any(a % ALIGNMENT for a in addresses):
                alignment = tuple(a % ALIGNMENT == 0 for a in addresses)
                one = launches.get(alignment) or launch(alignment)
            one(addresses, torch._C._cuda_getCurrentRawStream(index))

        return run
