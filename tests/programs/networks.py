"""The second generator of random programs: convolutions, pooling, indexing and scatter with duplicates, masks, mixed types,
in-place writes, gradients, control flow; each program at two to four sets of sizes.

It shares no code with the first one. Every tensor of a program carries the *names* of its sizes ("n", "h", "conv(h,3,2)"):
equal names are equal sizes in every set, so a step is chosen once and is valid in all of them. It also carries whether its
numbers are exact: arguments are small whole numbers, and steps that tell a tie from a near miss (comparisons, sorting,
casts to integers) are only applied to exact numbers, because rounding differs legitimately between two correct programs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from case import Case

FLOATS = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LOW = (torch.float16, torch.bfloat16)
NAMES = ("n", "c", "h", "w", "d", "k")
Step = Callable[[list[torch.Tensor]], torch.Tensor | None]


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor of the program before it runs."""

    at: int  # its place in the pool
    dims: tuple[str, ...]
    dtype: torch.dtype
    exact: bool = True
    leaf: bool = False  # an argument that takes a gradient, which cannot be written to

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


class Builder:
    """Chooses steps one after the other. The pool holds the arguments, then the result of every step that has one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"networks {seed}")
        self.train = self.rng.random() < 0.4
        self.arguments: list[tuple[tuple[str, ...], torch.dtype, str]] = []  # dims, dtype, kind
        self.pool: list[Tensor] = []
        self.transposed = {i for i in range(12) if self.rng.random() < 0.25}  # arguments that lie so in memory
        self.steps: list[Step] = []
        self.lines: list[str] = []
        self.eps = 0.0

    # -- arguments ---------------------------------------------------------------------------------------------------
    def argument(self, dims: tuple[str, ...], dtype: torch.dtype, kind: str = "numbers") -> Tensor:
        """All arguments are made before the first step. `kind`: numbers, or the name of the size they are indices of."""
        tensor = Tensor(len(self.pool), dims, dtype, leaf=self.train and dtype.is_floating_point)
        self.arguments.append((dims, dtype, kind))
        self.pool.append(tensor)
        self.lines.append(f"%{tensor.at}: {dtype}{list(dims)} {kind}")
        return tensor

    # -- choosing ----------------------------------------------------------------------------------------------------
    def pick(self, wanted: Callable[[Tensor], bool]) -> Tensor | None:
        found = [t for t in self.pool if wanted(t)]
        return self.rng.choice(found[-4:] if self.rng.random() < 0.6 else found) if found else None

    def add(
        self, name: str, run: Callable[..., torch.Tensor | None], inputs: list[Tensor], dims: Any = None, **facts: Any
    ) -> None:
        """A step; with `dims` it has a result, else it is a write."""
        places = [t.at for t in inputs]
        self.steps.append(lambda pool: run(*(pool[p] for p in places)))
        line = f"{name}({', '.join(f'%{p}' for p in places)})"
        if dims is not None:
            exact = facts.get("exact", all(t.exact for t in inputs))
            tensor = Tensor(len(self.pool), tuple(dims), facts.get("dtype", inputs[0].dtype), exact)
            self.pool.append(tensor)
            line = f"%{tensor.at}: {tensor.dtype}{list(dims)} = {line}"
        if not facts.get("exact", True) or any(not t.exact for t in inputs):
            self.eps = max([self.eps, *(EPS.get(t.dtype, 0.0) for t in inputs), EPS.get(facts.get("dtype"), 0.0)])  # type: ignore[arg-type]
        self.lines.append(line)

    def small(self, x: torch.Tensor) -> torch.Tensor:
        """Whole numbers stay exact in every type as long as they stay small."""
        return x.clamp(-9, 9)


STEPS: list[Callable[[Builder], None]] = []


def step(chooses: Callable[[Builder], None]) -> Callable[[Builder], None]:
    STEPS.append(chooses)
    return chooses


def is_image(t: Tensor) -> bool:
    return len(t.dims) == 4 and t.floating


def is_kernel(t: Tensor, x: Tensor) -> bool:
    """A weight for convolutions of x."""
    square = len(t.dims) == 4 and t.dims[2] == t.dims[3] and t.dims[2] in ("1", "3")
    return square and t.dims[:2] == ("4", x.dims[1]) and t.dtype == x.dtype


def exact_sum(t: Tensor) -> bool:
    """Sums of these are the same in every order."""
    return t.exact and t.dtype not in LOW


# -- convolutions, pooling, resampling -----------------------------------------------------------------------------------
@step
def convolution(b: Builder) -> None:
    x = b.pick(lambda t: is_image(t) and t.dims[1] in ("c", "4"))
    if x is None:
        return
    w = b.pick(lambda t: is_kernel(t, x))
    if w is None:
        return
    kernel = int(w.dims[2])
    stride, dilation = b.rng.choice([1, 1, 2]), b.rng.choice([1, 1, 2])
    padding = dilation * (kernel // 2)
    rows, columns = (d if stride == 1 else f"half({d})" for d in x.dims[2:])

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return b.small(F.conv2d(x, w, stride=stride, padding=padding, dilation=dilation))

    b.add(
        f"conv2d[{stride},{dilation}]",
        run,
        [x, w],
        (x.dims[0], "4", rows, columns),
        exact=x.exact and w.exact and exact_sum(x),
    )


@step
def convolution_1d(b: Builder) -> None:
    x = b.pick(lambda t: len(t.dims) == 3 and t.floating and t.dims[1] in ("c", "4"))
    w = x and b.pick(lambda t: is_kernel(t, x))
    if x is None or w is None:
        return
    transposed = b.rng.random() < 0.3 and x.dims[1] == "4"

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kernel = w[..., 0]
        convolve = F.conv_transpose1d if transposed else F.conv1d
        return b.small(convolve(x, kernel, padding=kernel.shape[-1] // 2))

    b.add(
        "conv_transpose1d" if transposed else "conv1d",
        run,
        [x, w],
        (x.dims[0], "4", x.dims[2]),
        exact=w.exact and exact_sum(x),
    )


@step
def pooling(b: Builder) -> None:
    x = b.pick(is_image)
    if x is None:
        return
    kind = b.rng.choice(["max", "avg", "adaptive_avg", "adaptive_max", "nearest", "bilinear"])
    if kind in ("max", "adaptive_max") and not x.exact:
        return
    runs = {
        "max": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
        "avg": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
        "adaptive_avg": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        "adaptive_max": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
        "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        "bilinear": lambda x: F.interpolate(x, size=(4, 5), mode="bilinear"),
    }
    half = [f"half({d})" for d in x.dims[2:]]
    after = {"max": half, "avg": half, "adaptive_avg": ["2", "3"], "adaptive_max": ["2", "3"], "bilinear": ["4", "5"]}
    dims = [*x.dims[:2], *after.get(kind, [f"twice({d})" for d in x.dims[2:]])]
    b.add(kind, runs[kind], [x], dims, exact=x.exact and kind in ("max", "adaptive_max", "nearest"))


@step
def normalisation(b: Builder) -> None:
    x = b.pick(is_image)
    if x is None:
        return
    kind = b.rng.choice(["layer", "batch", "group", "instance"])
    runs = {
        "layer": lambda x: F.layer_norm(x, x.shape[-1:], eps=1.0),
        "batch": lambda x: F.batch_norm(x, None, None, training=True, eps=1.0),
        "group": lambda x: F.group_norm(x, 1, eps=1.0),
        "instance": lambda x: F.instance_norm(x, eps=1.0),
    }
    b.add(f"{kind}_norm", runs[kind], [x], x.dims, exact=False)


# -- elements ------------------------------------------------------------------------------------------------------------
@step
def function_of_one(b: Builder) -> None:
    x = b.pick(lambda t: t.floating)
    if x is None:
        return
    smooth = {
        "gelu": F.gelu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "exp": lambda x: torch.exp(x.clamp(max=2)),
        "log": lambda x: torch.log1p(x.abs()),
        "sqrt": lambda x: torch.sqrt(x.square() + 1),
        "silu": F.silu,
        "softmax": lambda x: x.softmax(-1) if x.ndim else x.sigmoid(),
        "log_softmax": lambda x: x.log_softmax(0) if x.ndim else x.tanh(),
    }
    whole = {
        "relu": torch.relu,
        "neg": torch.neg,
        "abs": torch.abs,
        "scale": lambda x: (x * 3).clamp(-9, 9),
        "hardtanh": F.hardtanh,
        "leaky": lambda x: F.leaky_relu(x, 0.5),
        "round": lambda x: torch.round(x * 0.5),
        "sign": torch.sign,
        "clone": lambda x: x.clone(),
    }
    if x.exact and b.rng.random() < 0.6:
        name = b.rng.choice(sorted(whole))
        b.add(name, whole[name], [x], x.dims)
    else:
        name = b.rng.choice(sorted(smooth))
        b.add(name, smooth[name], [x], x.dims, exact=False)


@step
def function_of_two(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype != torch.bool)
    if x is None:
        return
    y = b.pick(lambda t: t.dtype != torch.bool and broadcasts(t.dims, x.dims))
    if y is None:
        return
    dtype = torch.promote_types(x.dtype, y.dtype)
    if x.dims == () or y.dims == ():
        dtype = torch.result_type(
            torch.empty([1] * len(x.dims), dtype=x.dtype), torch.empty([1] * len(y.dims), dtype=y.dtype)
        )
    runs = {
        "add": lambda x, y: (x + y).clamp(-9, 9),
        "sub": lambda x, y: (x - y).clamp(-9, 9),
        "mul": lambda x, y: (x * y).clamp(-9, 9),
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "div": lambda x, y: x / (1 + y.abs()),
    }
    name = b.rng.choice(sorted(runs))
    if name in ("maximum", "minimum") and not (x.exact and y.exact):
        name = "add"
    if name == "div":
        dtype = dtype if dtype.is_floating_point else torch.float32
        b.add(name, runs[name], [x, y], x.dims, dtype=dtype, exact=False)
    else:
        b.add(name, runs[name], [x, y], x.dims, dtype=dtype)


def broadcasts(small: tuple[str, ...], large: tuple[str, ...]) -> bool:
    """A tensor of these sizes may stand beside one of those and takes its shape."""
    return len(small) <= len(large) and all(a in (b, "1") for a, b in zip(reversed(small), reversed(large)))


@step
def mask(b: Builder) -> None:
    x = b.pick(lambda t: t.exact and t.dtype != torch.bool)
    if x is None:
        return
    y = b.pick(lambda t: t.exact and t.dims == x.dims and t.dtype != torch.bool)
    kind = b.rng.choice(["compare", "masked_fill", "where", "isin"])
    if kind == "compare" and y is not None:
        b.add("gt", lambda x, y: x > y, [x, y], x.dims, dtype=torch.bool)
    elif kind == "masked_fill":
        b.add("masked_fill", lambda x: x.masked_fill(x > 1, 2), [x], x.dims)
    elif kind == "isin":
        b.add("isin", lambda x: torch.isin(x, torch.tensor([0, 1], dtype=x.dtype)), [x], x.dims, dtype=torch.bool)
    elif kind == "where":
        m = b.pick(lambda t: t.dtype == torch.bool and broadcasts(t.dims, x.dims))
        if m is not None:
            b.add("where", lambda m, x: torch.where(m, x, -x), [m, x], x.dims, dtype=x.dtype)


@step
def cast(b: Builder) -> None:
    x = b.pick(lambda t: t.exact)
    if x is None:
        return
    dtype = b.rng.choice([*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
    if dtype == torch.uint8:
        b.add(
            "to uint8",
            lambda x: x.abs().to(torch.uint8) if x.dtype != torch.bool else x.to(torch.uint8),
            [x],
            x.dims,
            dtype=dtype,
        )
    else:
        b.add(f"to {dtype}", lambda x: x.to(dtype), [x], x.dims, dtype=dtype)


# -- reductions, products --------------------------------------------------------------------------------------------------
@step
def reduction(b: Builder) -> None:
    x = b.pick(lambda t: t.floating and len(t.dims) > 0)
    if x is None:
        return
    axis, keep = b.rng.randrange(len(x.dims)), b.rng.random() < 0.5
    dims = (
        [d for i, d in enumerate(x.dims) if i != axis]
        if not keep
        else ["1" if i == axis else d for i, d in enumerate(x.dims)]
    )
    if x.exact and b.rng.random() < 0.6:
        runs: dict[str, Any] = {
            "amax": lambda x: x.amax(axis, keepdim=keep),
            "max": lambda x: x.max(axis, keepdim=keep)[0],
            "sum": lambda x: x.sum(axis, keepdim=keep).clamp(-9, 9),
            "argmax": lambda x: x.argmax(axis, keepdim=keep),
            "any": lambda x: x.any(axis, keepdim=keep),
            "count": lambda x: (x > 0).sum(axis, keepdim=keep),
        }
        name = b.rng.choice(sorted(runs))
        dtype = {"argmax": torch.int64, "count": torch.int64, "any": torch.bool}.get(name, x.dtype)
        b.add(f"{name}[{axis}]", runs[name], [x], dims, dtype=dtype)
        return
    runs = {
        "mean": lambda x: x.mean(axis, keepdim=keep),
        "var": lambda x: x.var(axis, keepdim=keep, correction=0),
        "logsumexp": lambda x: x.logsumexp(axis, keepdim=keep),
        "norm": lambda x: (x.square().sum(axis, keepdim=keep) + 1).sqrt(),
    }
    name = b.rng.choice(sorted(runs))
    b.add(f"{name}[{axis}]", runs[name], [x], dims, exact=False)


@step
def order(b: Builder) -> None:
    x = b.pick(lambda t: t.exact and len(t.dims) > 0 and t.dtype != torch.bool)
    if x is None:
        return
    axis = b.rng.randrange(len(x.dims))
    runs: dict[str, Any] = {
        "sort": lambda x: x.sort(dim=axis, stable=True)[0],
        "argsort": lambda x: x.argsort(dim=axis, stable=True),
        "cummax": lambda x: x.cummax(axis)[0],
        "cumsum": lambda x: x.cumsum(axis).clamp(-9, 9),
        "flip": lambda x: x.flip(axis),
        "roll": lambda x: x.roll(1, axis),
    }
    name = b.rng.choice(sorted(runs))
    whole = not x.floating and name == "cumsum"
    b.add(f"{name}[{axis}]", runs[name], [x], x.dims, dtype=torch.int64 if whole or name == "argsort" else x.dtype)


@step
def product(b: Builder) -> None:
    x = b.pick(lambda t: t.floating and len(t.dims) in (2, 3, 4))
    if x is None:
        return
    y = b.pick(
        lambda t: (
            t.dtype == x.dtype
            and len(t.dims) == len(x.dims)
            and t.dims[:-2] == x.dims[:-2]
            and t.dims[-1] == x.dims[-1]
        )
    )
    if y is None:
        return
    dims = [*x.dims[:-1], y.dims[-2]]
    b.add("matmul", lambda x, y: b.small(x @ y.mT), [x, y], dims, exact=y.exact and exact_sum(x))


@step
def linear(b: Builder) -> None:
    w = b.pick(lambda t: t.dims == ("3", "d") and t.floating)
    x = w and b.pick(lambda t: t.dtype == w.dtype and len(t.dims) > 0 and t.dims[-1] == "d" and t.at != w.at)
    if w is None or x is None:
        return
    b.add("linear", lambda x, w: b.small(F.linear(x, w)), [x, w], [*x.dims[:-1], "3"], exact=w.exact and exact_sum(x))


# -- views -----------------------------------------------------------------------------------------------------------------
@step
def view(b: Builder) -> None:
    x = b.pick(lambda t: len(t.dims) >= 2)
    if x is None:
        return
    kind = b.rng.choice(["mT", "flatten", "unsqueeze", "slice", "permute", "pad"])
    last = [*x.dims[:-2], x.dims[-1], x.dims[-2]]
    if kind == "mT":
        b.add(kind, lambda x: x.mT, [x], last)
    elif kind == "flatten":
        b.add(kind, lambda x: x.flatten(0, 1), [x], [f"({x.dims[0]}*{x.dims[1]})", *x.dims[2:]])
    elif kind == "unsqueeze" and len(x.dims) < 4:
        b.add(kind, lambda x: x.unsqueeze(0), [x], ["1", *x.dims])
    elif kind == "slice":
        b.add(kind, lambda x: x[..., ::2], [x], [*x.dims[:-1], f"half({x.dims[-1]})"])
    elif kind == "permute":
        order = b.rng.sample(range(len(x.dims)), len(x.dims))
        b.add(f"permute{order}", lambda x: x.permute(order), [x], [x.dims[i] for i in order])
    elif kind == "pad" and x.dtype != torch.bool:
        b.add(kind, lambda x: F.pad(x, (1, 2), value=1), [x], [*x.dims[:-1], f"({x.dims[-1]}+3)"])


@step
def join(b: Builder) -> None:
    x = b.pick(lambda t: len(t.dims) > 0)
    y = x and b.pick(lambda t: t.dims == x.dims)
    if x is None or y is None:
        return
    axis = b.rng.randrange(len(x.dims))
    dims = [f"({d}+{d})" if i == axis else d for i, d in enumerate(x.dims)]
    b.add(
        f"cat[{axis}]", lambda x, y: torch.cat([x, y], axis), [x, y], dims, dtype=torch.promote_types(x.dtype, y.dtype)
    )


# -- indexing, scatter: indices repeat --------------------------------------------------------------------------------------
def rows_and_index(b: Builder, wanted: Callable[[Tensor], bool] = lambda t: True) -> tuple[Tensor, Tensor] | None:
    i = b.pick(lambda t: t.dims == ("k",) and t.dtype == torch.int64)
    size = b.arguments[i.at][2] if i is not None and i.at < len(b.arguments) else None
    x = b.pick(lambda t: len(t.dims) > 0 and t.dims[0] == size and wanted(t))
    return (x, i) if x is not None and i is not None else None


@step
def gather(b: Builder) -> None:
    found = rows_and_index(b)
    if found is None:
        return
    x, i = found
    runs: dict[str, Any] = {
        "index": lambda x, i: x[i],
        "index_select": lambda x, i: x.index_select(0, i),
        "gather": lambda x, i: x.gather(0, wide(i, x)),
        "negative": lambda x, i: x[i - x.shape[0]],
        "reversed": lambda x, i: x[x.shape[0] - 1 - i],
    }
    name = b.rng.choice(sorted(runs))
    b.add(name, runs[name], [x, i], ["k", *x.dims[1:]], dtype=x.dtype)


def wide(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A row's index for every element of the row."""
    return i.reshape(-1, *[1] * (x.ndim - 1)).expand(-1, *x.shape[1:])


@step
@step
def scatter(b: Builder) -> None:
    found = rows_and_index(b, lambda t: t.dtype != torch.bool)
    if found is None:
        return
    x, i = found
    y = b.pick(lambda t: t.dtype == x.dtype and t.dims == ("k", *x.dims[1:]))
    if y is None:
        return
    runs: dict[str, Any] = {
        "index_add": lambda x, i, y: x.index_add(0, i, y).clamp(-9, 9),
        "scatter_add": lambda x, i, y: x.scatter_add(0, wide(i, x), y).clamp(-9, 9),
        "index_put_accumulate": lambda x, i, y: x.index_put((i,), y, accumulate=True).clamp(-9, 9),
        "scatter_amax": lambda x, i, y: x.scatter_reduce(0, wide(i, x), y, "amax"),
        "scatter_amin": lambda x, i, y: x.scatter_reduce(0, wide(i, x), y, "amin", include_self=False),
        "scatter_mean": lambda x, i, y: x.scatter_reduce(0, wide(i, x), y, "mean"),
    }
    name = b.rng.choice(sorted(runs))
    if name in ("scatter_amax", "scatter_amin") and not (x.exact and y.exact):
        name = "index_add"
    rounding = (name == "scatter_mean" and x.floating) or (x.dtype in LOW)
    b.add(name, runs[name], [x, i, y], x.dims, exact=x.exact and y.exact and not rounding)


# -- writes ----------------------------------------------------------------------------------------------------------------
@step
def write(b: Builder) -> None:
    x = b.pick(lambda t: not t.leaf and t.dtype != torch.bool and t.exact and t.dims != ("k",))  # an index stays one
    if x is None:
        return
    kind = b.rng.choice(["add_", "mul_view", "zero_column", "set_row", "masked_fill_", "copy_"])
    if kind == "add_":
        b.add(kind, lambda x: done(x.add_(1).clamp_(-9, 9)), [x])
    elif kind == "mul_view" and len(x.dims) >= 2:
        b.add(kind, lambda x: done(x.mT[..., 1:].mul_(2).clamp_(-9, 9)), [x])
    elif kind == "zero_column" and len(x.dims) >= 1:
        b.add(kind, lambda x: done(x[..., 0].zero_()), [x])
    elif kind == "set_row" and len(x.dims) >= 1:
        b.add(kind, lambda x: x.__setitem__(-1, 3), [x])
    elif kind == "masked_fill_":
        b.add(kind, lambda x: done(x.masked_fill_(x < 0, 4)), [x])
    elif kind == "copy_":
        y = b.pick(lambda t: t.exact and t.at != x.at and broadcasts(t.dims, x.dims) and t.floating == x.floating)
        if y is not None:
            b.add(kind, lambda x, y: done(x.copy_(y)), [x, y])


def done(x: torch.Tensor) -> None:
    """A write has no result of its own."""


@step
def scatter_write(b: Builder) -> None:
    found = rows_and_index(b, lambda t: not t.leaf and t.dtype != torch.bool and t.exact)
    if found is None:
        return
    x, i = found
    runs: dict[str, Any] = {
        "index_fill_": lambda x, i: done(x.index_fill_(0, i, 2)),
        "index_put_": lambda x, i: x.__setitem__(i, 5),
        "add_at": lambda x, i: done(x.index_put_((i,), torch.ones((), dtype=x.dtype), accumulate=True).clamp_(-9, 9)),
    }
    name = b.rng.choice(sorted(runs))
    b.add(name, runs[name], [x, i])


# -- control flow ------------------------------------------------------------------------------------------------------------
@step
def branch(b: Builder) -> None:
    p = b.pick(lambda t: t.exact and t.dtype != torch.bool)
    x = b.pick(lambda t: t.floating and not t.leaf) if p is not None else None
    if p is None or x is None or b.rng.random() < 0.5:
        return

    def run(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        positive = (p.sum() > 0).reshape(())
        (result,) = torch.ops.higher_order.cond(positive, lambda x: (x + 1,), lambda x: (x * 2 - 1,), (x,))
        return b.small(result)

    b.add("cond", run, [p, x], x.dims, dtype=x.dtype, exact=x.exact)


@step
def loop(b: Builder) -> None:
    x = b.pick(lambda t: t.floating and not t.leaf and t.exact)
    if x is None or b.train or b.rng.random() < 0.5:
        return
    times = b.rng.randint(1, 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros((), dtype=torch.int64)
        _, y = torch.ops.higher_order.while_loop(
            lambda i, y: i < times, lambda i, y: (i + 1, (y + i).clamp(-9, 9)), (count, x.clone()), ()
        )
        return y

    b.add(f"while_loop[{times}]", run, [x], x.dims)


# -- a program -----------------------------------------------------------------------------------------------------------
def build(seed: int) -> Builder:
    b = Builder(seed)
    floating = b.rng.choice(FLOATS)
    b.argument(("n", "c", "h", "w"), floating)
    b.argument(("n", "c", "h", "w"), b.rng.choice([floating, *FLOATS, torch.int64, torch.int32, torch.bool]))
    if b.rng.random() < 0.7:
        for channels in ("c", "4"):
            kernel = b.rng.choice(["1", "3"])
            b.argument(("4", channels, kernel, kernel), floating)
    b.argument(("h", "d"), floating)
    b.argument(("3", "d"), floating)
    b.argument(("k",), torch.int64, b.rng.choice(["n", "h", "h"]))
    b.argument(("k", "d"), floating)
    for dims in b.rng.sample([("w",), ("d",), ("h", "1"), (), ("k", "c", "h", "w"), ("n", "4", "w")], 2):
        b.argument(dims, b.rng.choice([floating, torch.int64, torch.float32]))
    for _ in range(b.rng.randint(3, 9)):
        before = len(b.steps)
        while len(b.steps) == before:
            b.rng.choice(STEPS)(b)
    return b


def sizes_of(seed: int, index: int) -> dict[str, int]:
    """A set of sizes. All differ, so that PyTorch, which takes equal sizes for the same symbol, finds one for each name;
    neighbouring programs have the same ones, so that a batch of them has no more symbols than one."""
    rng = random.Random(f"sizes {seed // 100} {index}")
    return dict(zip(NAMES, rng.sample([2, 5, 6, 7, 8, 9, 10, 11], len(NAMES))))


def filled(b: Builder, sizes: dict[str, int], generator: torch.Generator) -> list[torch.Tensor]:
    """The arguments: small whole numbers, and indices with duplicates."""
    arguments = []
    for place, (dims, dtype, kind) in enumerate(b.arguments):
        shape = [sizes[d] if d in sizes else int(d) for d in dims]
        low, high = (-3, 4) if kind == "numbers" else (0, sizes[kind])
        x = torch.randint(low, high, shape, generator=generator).to(dtype)
        if place in b.transposed and len(shape) > 1:
            x = x.mT.contiguous().mT
        arguments.append(x.requires_grad_(b.train and dtype.is_floating_point))
    return arguments


def case(seed: int) -> Case:
    b = build(seed)

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        pool = list(args)
        for one in b.steps:
            result = one(pool)
            if result is not None:
                pool.append(result)
        return pool[len(args) :]

    generator = torch.Generator().manual_seed(seed)
    dynamic = b.rng.random() < 0.6
    sets = b.rng.randint(2, 4) if dynamic else 2  # each is a compilation of its own where sizes are fixed
    arguments = [filled(b, sizes_of(seed, i), generator) for i in range(sets)]
    coarsest = max(EPS.get(t.dtype, 0.0) for t in b.pool)  # gradients round wherever the program computes
    eps = 8 * coarsest if b.train else b.eps
    lines = [f"train={b.train} eps={eps}", *b.lines]
    return Case(f"networks {seed}", run, arguments, dynamic=dynamic, train=b.train, eps=eps, text="\n".join(lines))
