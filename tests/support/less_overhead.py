"""What takes a fifth of the time of all tests and is not what they are about."""

from __future__ import annotations

import gc
import sys


def apply() -> None:
    """To be called when everything is imported."""
    if "torch" in sys.modules:
        skip_measurements()
        share_empty_random_states()
    gc.collect()
    gc.freeze()  # what was imported stays: the collector need not look through it again and again
    gc.set_threshold(20_000, *gc.get_threshold()[1:])  # compiling makes many objects that stay for a while


def skip_measurements() -> None:
    """PyTorch measures every compilation for its makers: it times the guards once, with the CPU's caches emptied before,
    and writes down all settings. That is 40 of the 100 ms that compiling a small function takes."""
    import torch._dynamo.guards
    import torch._dynamo.utils

    def no_settings() -> None:
        return None

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    for settings in ("get_dynamo", "scrubbed_inductor", "compiler", "functorch"):
        name = f"_{settings}_config_for_logging"
        if torch.__version__ < (2, 13) and not hasattr(torch._dynamo.utils, name):
            continue  # PyTorch 2.11 has not all of them
        assert hasattr(torch._dynamo.utils, name), name
        setattr(torch._dynamo.utils, name, no_settings)


def share_empty_random_states() -> None:
    """Of each graph AOTAutograd makes twelve empty tensors for random numbers by functional ops, which airgraph does not
    ask for. As fake tensors they take a tenth of the time that is left of compiling a small function."""
    import torch
    from torch._decomp.decompositions_for_rng import PhiloxState

    empty = torch.tensor(())

    def reset(self: PhiloxState) -> None:
        self.seed = self.base_offset = empty
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    known = {"seed", "base_offset", "relative_offset", "offset_advanced_at_least_once"}
    if torch.__version__ < (2, 13) and vars(PhiloxState()).keys() != known:
        return
    assert vars(PhiloxState()).keys() == known
    assert not torch._functorch.config.functionalize_rng_ops
    PhiloxState.reset = reset  # type: ignore[method-assign]
