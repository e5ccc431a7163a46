"""One Triton kernel from its source to code for a GPU.

Needs Triton and nothing else, neither PyTorch nor a GPU: the server of build_server.py is ready in a quarter of a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import linecache
from dataclasses import dataclass
from functools import cache
from typing import Any

from airgraph.errors import EngineError

DEPENDENT_LAUNCH = 90  # compute capability
ALIGNMENT = 16  # bytes: what is aligned so is read in whole vectors


@dataclass(frozen=True)
class KernelVariant:
    """One compilation of a kernel's source. `aligned` says which pointers are, `wide` whether indices have 64 bits."""

    text: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    aligned: tuple[bool, ...]
    wide: bool = False
    checks: bool = False
    fuses: bool = False


@dataclass(frozen=True)
class Binary:
    """A kernel for one kind of GPU. `early`: it waits for the kernel before it by itself."""

    code: bytes
    name: str
    shared: int
    warps: int
    early: bool

    def to_bytes(self) -> bytes:
        facts = {key: value for key, value in dataclasses.asdict(self).items() if key != "code"}
        head = json.dumps(facts).encode()
        return len(head).to_bytes(8, "little") + head + self.code

    @classmethod
    def from_bytes(cls, data: bytes) -> Binary:
        end = 8 + int.from_bytes(data[:8], "little")
        return cls(code=data[end:], **json.loads(data[8:end]))


@cache
def jit_function(text: str) -> Any:
    """The function of a kernel's source, which is what render.py, attention.py or vectors.py wrote, never what a file says.
    Triton reads the source again by its file name, which is not on disk."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    text = text.replace("def kernel(", f"def airgraph_{digest}(")  # the name that profilers show
    file = f"<airgraph kernel {digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {"__name__": f"airgraph_kernel_{digest}"}
    exec(compile(text, file, "exec"), scope)
    return scope[f"airgraph_{digest}"]


def built(variant: KernelVariant, capability: int) -> Binary:
    """By the stages of Triton's compiler, one after the other. `triton.compile` also writes the text of each to a cache of
    its own: 6.7 s of CPU time instead of 4.8 for the nine kernels of a Llama, besides waiting for the disk."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function = jit_function(variant.text)
    names = function.arg_names
    constants: dict[str, Any] = {**dict(variant.constants)}
    if "INDEX" in names:
        constants["INDEX"] = tl.int64 if variant.wide else tl.int32
    constants["EARLY"] = capability >= DEPENDENT_LAUNCH
    signature = dict(variant.signature) | dict.fromkeys(constants, "constexpr")
    pointers = [n for n, t in variant.signature if t.startswith("*")]
    divisible = [[["tt.divisibility", ALIGNMENT]]] * len(pointers)
    attributes = {(names.index(n),): a for n, a, good in zip(pointers, divisible, variant.aligned) if good}
    source = ASTSource(
        fn=function,
        signature={n: signature[n] for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = backend.parse_options(
        {
            "num_warps": variant.warps,
            "enable_fp_fusion": variant.fuses,
            "debug": variant.checks,
            "sanitize_overflow": False,  # else `debug` asserts it at every sum of two indices; `wide` has seen to that
        }
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    made = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    facts: dict[str, Any] = {"target": target, **vars(options)}  # stages add to them
    for stage in stages.values():
        made = stage(made, facts)
    if facts["global_scratch_size"] or facts["profile_scratch_size"]:
        raise EngineError("a Triton kernel wants scratch memory, which launches do not provide")
    return Binary(made, facts["name"], facts["shared"], facts["num_warps"], capability >= DEPENDENT_LAUNCH)
