"""Undocumented parts of PyTorch that are used: private modules, C++ symbols, memory layouts, tables of functions.

Read this before supporting another version of PyTorch. tests/test_torch_internals.py finds every use in the source and
fails if one is missing here, or if a row is not used any more. It also looks each name up in the PyTorch that is installed.

`if_gone` says what happens where a name is missing: "import" stands for an ImportError or AttributeError when the module
that uses it is imported, so that it is noticed at once and not in the middle of a call.
"""

from __future__ import annotations

from typing import NamedTuple

TESTED = ("2.11", "2.13")  # versions of PyTorch, of which the suite runs on the last


class Internal(NamedTuple):
    name: str
    purpose: str
    if_gone: str = "import"


NPU = "airgraph.compat.install() fails; nothing else needs it"
BY_PYTHON = "calls into PyTorch go through Python"
REFERENCE = "graphs run on the reference engine, with one warning"

PYTHON = (
    # -- capturing graphs
    Internal(
        "torch._dynamo",
        "marks of dynamic sizes, the compiled frame and its arguments, callbacks, device interfaces, reset",
    ),
    Internal("torch._functorch", "AOTAutograd: functional forward and backward graphs"),
    Internal("torch._guards", "the compile id, the fake mode, parameters and guards of the graph that is compiled"),
    Internal("torch.utils._ordered_set", "the guards of a graph, less those that native code watches"),
    Internal("torch._C._dispatch_keys", "in which word a tensor has them", "Dynamo checks all guards"),
    Internal("torch._subclasses", "fake tensors"),
    Internal("torch._prims_common", "the memory format a tensor's strides suggest, and whether it is contiguous"),
    Internal("torch._inductor", "its pattern matcher for user patterns; compat: its backend for graphs of npu tensors"),
    Internal("torch._logging", "explain: the structured trace of graph breaks and recompilations"),
    Internal("torch._dispatch", "compat: the Python dispatcher while a fallback graph is traced"),
    Internal("torch._TorchCompileInductorWrapper", "compat: where torch.compile chooses Inductor", NPU),
    Internal("torch.fx.graph_module._loader", "sources of graphs that are gone, which are released"),
    Internal("torch.fx.node._side_effectful_functions", "ops that dead-code elimination must keep"),
    Internal("torch.fx.experimental._config", "shape handling: sizes of 0 and 1 are not specialised meanwhile"),
    # -- reading ops and structures
    Internal("torch._ops", "the classes of ops, and their schemas"),
    Internal("torch.utils._mode_utils", "no dispatch modes while what tracing wrote is put back"),
    Internal("torch.utils._pytree", "nested arguments and results as lists of leaves"),
    Internal("torch.utils._python_dispatch", "dispatch modes: switched off while constants are made, and our own"),
    Internal("torch.utils._sympy", "the functions in symbolic sizes, for reading them from a file"),
    Internal("torch._sym_log2", "a number op of symbolic sizes"),
    Internal("torch._sym_sqrt", "a number op of symbolic sizes"),
    # -- running
    Internal("torch._C._storage_Use_Count", "slots: whether somebody holds a result of a captured program"),
    Internal("torch._C._construct_storage_from_data_pointer", "replay on the CPU: views that keep no memory alive"),
    Internal("torch._C._set_grad_enabled", "replay: the grad mode, without the cost of a context manager"),
    Internal("torch._C._cuda_endAllocateToPool", "leaving a failed CUDA capture", "a failed capture ends in an error"),
    Internal("torch._C._cuda_getCurrentRawStream", "the address of the current CUDA stream", "CUDA programs fail"),
    Internal("torch._C._cuda_clearCublasWorkspaces", "memory of cuBLAS around a capture", "CUDA programs fail"),
    Internal(
        "torch._C._cuda_isCurrentStreamCapturing",
        "replay: whether the user captures a CUDA graph",
        "CUDA programs fail",
    ),
    Internal("torch._foreach_copy_", "replay: all arguments copied by one kernel"),
    Internal("torch.autograd.profiler._is_profiler_enabled", "whether a call has to appear in a profile"),
    # -- the native engine
    Internal("torch._C.__file__", "where libtorch is", REFERENCE),
    Internal("torch._C._dispatch_dump", "how the kernel of an op is called: with or without boxing", REFERENCE),
    Internal("torch._C.DispatchKey", "the layers of the dispatcher that calls go below", REFERENCE),
    Internal("torch.Tensor._make_subclass", "stand-ins that note which ATen ops a meaning comes to", REFERENCE),
    # -- the emulated npu
    Internal("torch._C.DispatchKeySet", "dispatching without the emulated device", NPU),
    Internal("torch._C.Generator", "random numbers of the device", NPU),
    Internal("torch._C.TensorBase", "the class of every tensor, before its subclasses", NPU),
    Internal("torch._C._AutoDispatchBelowADInplaceOrView", "captured ops run as they were recorded", NPU),
    Internal("torch._C._DisableAutocast", "captured ops run as they were recorded", NPU),
    Internal("torch._C._ExcludeDispatchKeyGuard", "autocast of the device", NPU),
    Internal("torch._C._acc", "hooks and guard of a backend written in Python", NPU),
    Internal("torch._C._accelerator_getDeviceIndex", "the current device, as C++ sees it", NPU),
    Internal("torch._C._accelerator_setDeviceIndex", "the current device, as C++ sees it", NPU),
    Internal("torch._C._autograd", "the number of the device type", NPU),
    Internal("torch._C._disabled_torch_dispatch_impl", "composite ops of the device", NPU),
    Internal("torch._C._dispatch_get_all_op_names", "which ops the device needs a kernel for", NPU),
    Internal("torch._C._dispatch_has_kernel_for_dispatch_key", "which ops the device needs a kernel for", NPU),
    Internal("torch._C._distributed_c10d", "collectives of the device", NPU),
    Internal(
        "torch._C._dynamo", "guards that are asked only where something changed; compat: Dynamo's view of the device"
    ),
    Internal("torch.distributed.distributed_c10d._world", "the name of a process group, from its backend", NPU),
    Internal("torch._C._from_dlpack", "a tensor of the device as one of the host, and back", NPU),
    Internal("torch._C._to_dlpack", "a tensor of the device as one of the host, and back", NPU),
    Internal("torch._C._get_privateuse1_backend_name", "whether the name is taken", NPU),
    Internal("torch._C._should_allow_numbers_as_tensors", "arguments of ops of the device", NPU),
    Internal("torch._conj", "lazy conjugation of tensors of the device", NPU),
    Internal("torch._neg_view", "lazy negation of tensors of the device", NPU),
    Internal("torch.distributed.Backend._plugins", "the process group of the device", NPU),
    Internal("torch.distributed.distributed_c10d._resolve_process_group", "functional collectives of the device", NPU),
    Internal("torch.distributed._functional_collectives", "broadcast and all_to_all as parts of a graph", NPU),
    Internal("torch.utils._device", "which functions take a device, for transfer_to_npu", NPU),
)

SYMBOLS = (
    Internal("_Z16THPVariable_WrapON2at10TensorBaseE", "a tensor of C++ as one of Python", REFERENCE),
    Internal("_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE", "calls below autograd", BY_PYTHON),
    Internal("_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE", "calls below autograd", BY_PYTHON),
    Internal("_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb", "calls below autograd", BY_PYTHON),
    Internal("_ZN3c104impl29tls_set_dispatch_key_includedENS_11DispatchKeyEb", "calls below autograd", BY_PYTHON),
    Internal("_ZNK2at10TensorBase8_versionEv", "whether a packed weight was written to", "only frozen ones are packed"),
    Internal(
        "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", "versions of what a replay writes", "Python counts"
    ),
    Internal("_ZN2at6native12is_inferenceERKNS_6TensorE", "arguments that have no version", "the same"),
    Internal("_ZN3c104impl26device_guard_impl_registryE", "several emulated devices", "install(devices=2) refuses"),
)

GENERATED = "generated kernels multiply all matrices"
MKL = (  # inside libtorch_cpu on x86-64 (engine/native/kernels/blas.py)
    Internal("cblas_sgemm_pack_get_size", "packed weights", GENERATED),
    Internal("cblas_sgemm_pack", "packed weights", GENERATED),
    Internal("cblas_sgemm_compute", "products with packed weights", GENERATED),
    Internal("MKL_Set_Num_Threads_Local", "MKL stays in the thread that calls it", GENERATED),
)

# (file, what is taken for granted, what checks it)
LAYOUTS = (
    (
        "engine/native/runtime.py",
        "an at::Tensor stands behind PyObject_HEAD (two words) in a tensor of Python",
        "tests",
    ),
    ("engine/native/calls/words.py", "the same, for handles that calls are given", "tests"),
    (
        "engine/native/calls/dispatch.py",
        "StableIValue: how operands and optionals lie before 2.13",
        "the ABI's version",
    ),
    (
        "compat/npu/guard.py",
        "the table of DeviceGuardImplInterface has the order of its header",
        "before it is changed",
    ),
    (
        "engine/native/short_call.py",
        "a word of a StorageImpl has the number of references to it in its lower half",
        "reference_word(), once; where it fails, Python makes all calls",
    ),
    (
        "engine/native/replay_code.py",
        "of Python, not of PyTorch: the address of a list's items stands behind PyObject_HEAD and the number of items",
        "check_lists(), once; where it fails, Python makes all calls",
    ),
    (
        "engine/native/dict_watch.py",
        "of Python, not of PyTorch: a dict's version tag stands behind PyObject_HEAD and the number of entries",
        "has_tags(), once; where it fails, entries are compared",
    ),
    (
        "engine/native/object_watch.py",
        "what a tensor of C++ is like lies in words of it and of its autograd data; of Python: words of tuples, cells and "
        "functions, and the version tag of a class",
        "layout(), once; where something is not found, Dynamo checks all guards",
    ),
    (
        "capture/dead_compilations.py",
        "of Python, not of PyTorch: weakref.finalize._registry has every finalizer that has not run",
        "tests; where it is gone, guards of dead graphs stay",
    ),
    ("compat/npu/tables.py", "an object's first word is its table; the word before the table is its class", "the same"),
)
