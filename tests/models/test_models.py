"""Real architectures through airgraph: forward, training step, changing sizes, generation with a static cache.

Eager's float32 result is not the truth: the same model in float64 decides who is nearer to it. Ours may be off by a small
multiple of what eager is off by. How many graphs a model becomes is decided before us, so aot_eager tells what to expect:
one, or as many as it makes of it.

One model by itself:

    python -m pytest tests/models/test_models.py -k 'forward and llama'
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from zoo import VOCAB, ZOO, Inputs, Row, tokens

import airgraph

pytestmark = pytest.mark.slow
EPS = torch.finfo(torch.float32).eps
SIZES = ((2, 8), (3, 12), (5, 16))
Model = Callable[..., Any]

# What aot_eager cannot do either, and why: (test, model).
AOT_CANNOT = {
    ("forward", "nystromformer"): "its mask does not fit its landmarks; only eager may drop a mask of ones",
    ("forward", "paligemma"): "traced by Dynamo it gives other numbers, whatever the backend",
}
# Models that Dynamo cuts into several graphs, with what cuts them.
IN_PIECES = {"encodec": "branches on the padding it computes"}

TRAINED = {
    "bert": "tokens",
    "albert": "tokens",
    "modernbert": "tokens",
    "gpt2": "tokens",
    "llama": "tokens",
    "qwen3": "tokens",
    "gemma2": "tokens",
    "mamba2": "tokens",
    "t5": "tokens",
    "bart": "tokens",
    "vit": "classes",
    "resnet": "classes",
    "swin": "classes",
    "wav2vec2": "tokens",
    "distilbert": "tokens",
}
DYNAMIC = ("bert", "distilbert", "electra", "roberta", "gpt2", "gpt_neox", "opt", "llama", "qwen2", "phi")
GENERATING = ("llama", "qwen3", "gemma")
# Models whose graphs are much like those of another one: (test, model).
AT_NIGHT = {
    *(("training", name) for name in ("albert", "distilbert", "bart", "qwen3", "modernbert", "gemma2", "t5", "swin")),
    *(("dynamic", name) for name in ("distilbert", "electra", "roberta", "gpt2", "gpt_neox", "opt", "phi", "qwen2")),
    ("generation", "qwen3"),
    *(("forward", name) for name in ("roberta", "distilbert", "electra", "albert", "esm", "layoutlm", "mobilebert")),
    *(
        ("forward", name)
        for name in ("gpt_neox", "opt", "mistral", "qwen2", "gemma", "gemma3", "phi3", "olmo2", "cohere")
    ),
    *(
        ("forward", name)
        for name in ("qwen3_moe", "dinov2", "ast", "siglip", "llava", "paligemma", "bart", "wavlm", "mpt", "encodec")
    ),
}


def chosen(test: str, names: Sequence[str]) -> list[Any]:
    """The parameters of a test; what aot_eager cannot do is an expected failure."""

    def marks(name: str) -> list[Any]:
        reason = AOT_CANNOT.get((test, name))
        night = [pytest.mark.night] if (test, name) in AT_NIGHT else []
        return [*night, *([pytest.mark.xfail(reason=reason, strict=True)] if reason else [])]

    return [pytest.param(name, marks=marks(name)) for name in names]


# -- running --------------------------------------------------------------------------------------------------------
def made(row: Row, batch: int = 2, length: int = 8) -> Inputs:
    torch.manual_seed(1)
    return row.inputs(batch, length)


def double(model: torch.nn.Module) -> torch.nn.Module:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the grouped product has no float64
    return exact


def doubled(inputs: Inputs) -> Inputs:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def run(model: Model, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(tensors(model(**inputs)))


def tensors(found: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a model's output, those inside caches too."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from tensors(part)
    elif hasattr(found, "items"):
        yield from tensors(list(found.values()))
    elif type(found).__module__ == "transformers.cache_utils":
        yield from tensors(vars(found))


def compiled(model: Model, backend: Any = None, **options: Any) -> Model:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend=backend or airgraph.backend(), **options)


def graphs() -> int:
    """How many graphs were compiled since `compiled`."""
    return counters["stats"]["unique_graphs"]


# -- comparing ------------------------------------------------------------------------------------------------------
def same(mine: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    assert len(mine) == len(eager) == len(exact) > 0
    for i, (m, e, x) in enumerate(zip(mine, eager, exact)):
        assert (m.dtype, m.shape, m.stride()) == (e.dtype, e.shape, e.stride()), f"output {i}"
        if m.is_floating_point():
            near(m, e, x, f"output {i}")
        else:
            assert torch.equal(m, e), f"output {i}"


def near(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str, scale: float | None = None) -> None:
    """At most four times as far from the float64 result as eager is. `scale` is the size of the numbers that met on the
    way, where the result itself may have cancelled to nothing."""
    assert not exact.isnan().any(), f"{what}: the model itself gives no numbers"
    assert torch.equal(mine.isfinite(), eager.isfinite()), f"{what}: infinite elsewhere"
    floor = 8 * EPS * (largest(exact) if scale is None else scale)
    error, allowed = largest(mine - exact), 4 * largest(eager - exact) + floor
    assert error <= allowed, f"{what}: {error:.3g} from the float64 result, {allowed:.3g} allowed"


def largest(x: torch.Tensor) -> float:
    """Masked scores are infinite in all three results, and their difference is no number."""
    return x.nan_to_num(0, 0, 0).abs().max().item() if x.numel() else 0.0


# -- forward --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", chosen("forward", [*ZOO]))
def test_forward(name):
    row = ZOO[name]
    model, inputs = row.make(), made(row)
    exact, eager = run(double(model), doubled(inputs)), run(model, inputs)
    whole = name not in IN_PIECES
    mine = compiled(model, fullgraph=whole)
    run(mine, inputs)
    same(run(mine, inputs), eager, exact)
    assert graphs() == (1 if whole else by_aot_eager(model, inputs))


def by_aot_eager(model: torch.nn.Module, inputs: Inputs) -> int:
    run(compiled(model, "aot_eager"), inputs)
    return graphs()


# -- training -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", chosen("training", [*TRAINED]))
def test_training_step(name):
    row = ZOO[name]
    model = row.make().train()
    inputs = {**made(row), "labels": labels(TRAINED[name])}
    exact, eager, mine = double(model), copy.deepcopy(model), model
    wanted, given = train(exact, exact, doubled(inputs)), train(eager, eager, inputs)
    found = train(mine, compiled(mine), inputs)
    for part in wanted:
        scale = max(largest(x) for x in wanted[part].values())
        assert found[part].keys() == given[part].keys() == wanted[part].keys()
        for key, value in wanted[part].items():
            near(found[part][key], given[part][key], value, f"{part} {key}", scale)


def labels(kind: str) -> torch.Tensor:
    torch.manual_seed(3)
    return tokens(2, 8) % 30 + 1 if kind == "tokens" else torch.tensor([0, 1])


def train(model: torch.nn.Module, call: Model, inputs: Inputs) -> dict[str, dict[str, torch.Tensor]]:
    """One step, with dropout; layers that are dropped at random cut the graph. Adam divides a gradient by its own size, which would turn the rounding of a gradient that
    is nearly nothing into a whole step; its epsilon is large here, so that rounding stays rounding."""
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    loss = call(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"loss": {"loss": loss.detach()}, "gradient": gradients, "parameter": state}


# -- changing sizes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", chosen("dynamic", DYNAMIC))
def test_changing_batch_and_length(name):
    row = ZOO[name]
    model = row.make()
    exact, mine = double(model), compiled(model, fullgraph=True, dynamic=True)
    for batch, length in SIZES:
        inputs = made(row, batch, length)
        same(run(mine, inputs), run(model, inputs), run(exact, doubled(inputs)))
    assert graphs() == 1


# -- generation -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", chosen("generation", GENERATING))
def test_generation_with_a_static_cache(name):
    """A prompt of 4 tokens, then token by token: one graph for the prompt, one for all that follow."""
    model = ZOO[name].make()
    exact = double(model)
    torch.manual_seed(1)
    prompt = tokens(2, 4)
    mine = compiled(model, fullgraph=True, dynamic=False)
    steps = zip(generate(mine, model, prompt), generate(model, model, prompt), generate(exact, exact, prompt))
    for place, (m, e, x) in enumerate(steps):
        near(m, e, x, f"logits of token {place}")
        assert torch.equal(m.argmax(-1), e.argmax(-1)), f"token {place}"
    assert graphs() == 2


def generate(call: Model, model: torch.nn.Module, prompt: torch.Tensor, count: int = 6) -> Iterator[torch.Tensor]:
    """The logits of each new token, the most likely one being the next input."""
    config = model.config
    cache = transformers.StaticCache(config, max_cache_len=16)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache.early_initialization(len(prompt), heads, width, model.dtype, model.device)
    given, start = prompt, 0
    for _ in range(count):
        positions = torch.arange(start, start + given.shape[1])[None].expand(len(prompt), -1)
        with torch.no_grad():
            logits = call(input_ids=given, past_key_values=cache, position_ids=positions).logits[:, -1]
        yield logits
        start += given.shape[1]
        given = logits[:, :VOCAB].argmax(-1, keepdim=True)


def test_a_static_cache_is_written_in_place():
    """No cache of keys or values is copied, neither before new tokens are written nor back into the argument."""
    model, made = ZOO["llama"].make(), []
    exact = double(model)
    prompt = tokens(2, 4)
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        mine = list(generate(compiled(model, fullgraph=True, dynamic=False), model, prompt, 3))
    for m, e, x in zip(mine, generate(model, model, prompt, 3), generate(exact, exact, prompt, 3), strict=True):
        near(m, e, x, "logits")
    sizes = sorted([2, model.config.num_key_value_heads, 16, model.config.head_dim])  # of a cache, in any order
    for program in made:  # prompt, decode
        found = re.findall(r"^\S+: float\[(.*?)\] (\w+)", program.native.plan.text(), re.M)
        kinds = [kind for shape, kind in found if sorted(map(int, shape.split(", "))) == sizes]
        assert len(kinds) >= 4 and set(kinds) == {"input"}
