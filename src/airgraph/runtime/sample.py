"""check="sample": now and then the same call is also run op by op, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from airgraph.engine.protocol import Steps, Symbols
from airgraph.engine.strides import copy_strided
from airgraph.errors import ReplayError
from airgraph.ir.verify import place
from airgraph.runtime.arena import Arena
from airgraph.runtime.recording import Recording
from airgraph.torch_types import as_tensor


def checked(program: Any, recording: Recording, given: Sequence[Any], symbols: Symbols) -> list[Any]:
    """A replay, and the same call op by op on copies; a difference names the node."""
    copies = [copy_strided(a, a.stride()) if i in program.written else a for i, a in enumerate(given)]
    state = random_state(program.arena)
    expected = program.compute(copies, dict(symbols))
    after = random_state(program.arena)
    set_random_state(program.arena, state)
    before = [a.clone() if i in program.written else a for i, a in enumerate(given)]
    outputs = program.replay(recording, given, symbols)
    set_random_state(program.arena, after)
    program.journal.counters["checked"] += 1
    pairs = [*zip(outputs, expected), *((given[i], copies[i]) for i in sorted(program.written))]
    if not all(alike(a, b) for a, b in pairs):
        raise difference(program, before, symbols, state)
    return outputs


def difference(program: Any, given: Sequence[Any], symbols: Symbols, state: Any) -> ReplayError:
    """The first node whose value differs between a recording that keeps all values and a run op by op."""
    executable: Steps = program.executable
    set_random_state(program.arena, state)
    seen = every_value(program, given, dict(symbols))
    recording = program.bound({}, given, symbols, [], leased=False)
    set_random_state(program.arena, state)
    program.record_parts(recording, given, symbols, keep=True)
    set_random_state(program.arena, state)
    recording.replay(given, dict(symbols))
    for step in executable.steps:
        for key in step.makes:
            if key in recording.env and not alike(recording.env[key], seen.get(key)):
                return ReplayError(
                    f"a replay of {program.name} differs from the same call op by op, first at {step.nodes[-1].op}",
                    where=place(executable.graph, step.nodes[-1]),
                    hint="force_recapture=True, then force_eager=True tell whether capturing or memory is at fault",
                )
    return ReplayError(
        f"a replay of {program.name} differs from the same call op by op, though none of its nodes does",
        hint="force_recapture=True tells whether its memory was written to by others",
    )


def every_value(program: Any, given: Sequence[Any], symbols: Symbols) -> dict[int, Any]:
    """What the steps make in a run of their own, none of them in place."""
    executable: Steps = program.executable
    env, seen = dict(executable.constants), {}
    for spec, arg in zip(program.boundary.arguments, given):
        if spec.name in executable.inputs:
            env[executable.inputs[spec.name]] = as_tensor(arg)
    for step in executable.steps:
        replace(step, last_uses=(), in_place=None).advance(env, symbols, executable.graph)
        for key in step.makes:
            value = env[key]
            seen[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return seen


def random_state(arena: Arena) -> Any:
    return torch.cuda.get_rng_state(arena.device) if arena.device.type == "cuda" else torch.get_rng_state()


def set_random_state(arena: Arena, state: Any) -> None:
    torch.cuda.set_rng_state(state, arena.device) if arena.device.type == "cuda" else torch.set_rng_state(state)


def alike(a: Any, b: Any) -> bool:
    """Equal up to the rounding of kernels that may add in another order."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    step = torch.finfo(a.dtype).eps
    scale = b.abs().nan_to_num(0, 0, 0).max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=16 * step, atol=16 * step * scale, equal_nan=True)
