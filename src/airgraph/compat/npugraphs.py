"""`torch.compile(model, backend="npugraphs", options={...})`: torch_npu's name for capture and replay without fusion.

torch_npu lists options for it and drops them all; here they mean what they say:

    triton.cudagraphs       False: nothing is captured
    trace.enabled           write every stage of every graph under torch_compile_debug/
    npu_backend             which compiler makes NPU kernels: checked, and named in the journal

and beside them every field of `airgraph.Config` but `mode`. As in Inductor, `-` may stand for `_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airgraph.config import Config
from airgraph.errors import ConfigError

BACKENDS = ("default", "mlir", "dvm", "ascendc", "triton_experimental")
FIELDS = [name for name in Config.names() if name not in ("mode", "foreign")]
KNOWN = ["triton.cudagraphs", "trace.enabled", "npu_backend", *FIELDS]


def to_config(options: Mapping[str, Any] | None, mode: str | None = None) -> Config:
    """The options in airgraph's terms."""
    if mode not in (None, "reduce-overhead"):
        raise ConfigError(f'backend="npugraphs" has no mode {mode!r}', where={"allowed": "'reduce-overhead', None"})
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    for name in given:
        if name not in KNOWN:
            raise ConfigError(f'unknown option {name!r} of backend="npugraphs"', where={"known": ", ".join(KNOWN)})
    fields = {name: given[name] for name in FIELDS if name in given}
    if not checked(given, "triton.cudagraphs", True):
        fields["force_eager"] = True
    if checked(given, "trace.enabled", False):
        fields["trace"] = True
    remarks = npu_backend(given.get("npu_backend"))
    fields["remarks"] = (*fields.get("remarks", ()), *remarks)
    return Config(**{"log": "npugraphs", **fields, "mode": "reduce-overhead"})


def checked(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "True, False"})
    return value


def npu_backend(name: Any) -> list[str]:
    if name is None or name == "default":
        return []
    if name not in BACKENDS:
        raise ConfigError(f"npu_backend cannot be {name!r}", where={"allowed": ", ".join(map(repr, BACKENDS))})
    return [f"npu_backend={name!r} has no effect: there are no kernels for NPUs to compile here"]
