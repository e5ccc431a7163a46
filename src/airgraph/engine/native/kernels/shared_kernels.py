"""The kernels that serve every graph (matrix products, attention, convolution) as steps that a frame can list.

    step(args, sizes, begin, end, scratch)          as a loop's kernel (loops.py)
    kernel("step_nt")                               → its address

They come in families: some functions of a module's text, with what these need. One is compiled (0.2 to 0.6 s each on a
Xeon) when a graph uses a kernel of it; those of `most_used` may be before, while PyTorch reads the model
(airgraph.engine.native.warm_up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

from airgraph.engine.native.kernels import (
    attention,
    bfloat16,
    conv_bfloat16,
    conv_last,
    conv_last_kernels,
    experts,
    gemm,
    halves,
)
from airgraph.engine.native.kernels.gemm import BANDS, BATCH, COLUMNS, ROWS
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.llvm.jit import LazyCode, Unit


class Gemm:
    """The sizes of a matrix product, behind the error word. With a packed weight the function at PACKED multiplies: MKL
    (blas.py), with blocks of BLOCK columns that are APART bytes from each other, or `step_panels`, with the dimensions of
    a convolution at PANELS. Where threads divide rows and columns, a band has BAND rows, and ACROSS jobs: its columns, and
    those that the last panel lacks. Of bfloat16.py PACKED is 1 where the weight is packed."""

    FORM, BATCH, M, N, K, LDA, LDB, LDC, A_BATCH, B_BATCH, C_BATCH, SPLIT, A_AT, B_AT, BIAS_AT, BLOCK = range(1, 17)
    APART, PACKED, PANELS, BAND, ACROSS, WORDS = 17, 18, 19, 20, 21, 22


def product_step(form: int, tuned: bool = False) -> str:
    """The step for this one of gemm.FORMS; `tuned`: the weight may turn out to be faster transposed."""
    name = gemm.FORMS[form]
    if name in gemm.BFLOAT16_FORMS:
        return "step_bfloat16"
    if name in gemm.ELEMENTS:
        return "step_halves"
    return "step_gemm" if tuned else f"step_{name}"


def step_gemm(name: str, forms: Sequence[str]) -> str:
    """args: a, b, out, bias. SPLIT: what the jobs count (products.SPLITS)."""
    given = "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch"
    f = Function(name, given, exported=True)
    packed = f.word("%sizes", Gemm.PACKED, "ptr")
    f.leave(f.test("ne", packed, "null", "ptr"), lambda: f.call(packed, given))
    a, b, c, bias = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(4))
    form, batch, m, n, k, lda, ldb, ldc, sa, sb, sc, split = (f.word("%sizes", i) for i in range(1, 13))
    of = "half" if forms[0] in gemm.ELEMENTS else "float"  # the size of an element of b
    a, bias = (f.at(p, f.word("%sizes", i)) for p, i in ((a, Gemm.A_AT), (bias, Gemm.BIAS_AT)))
    b = f.at(b, f.word("%sizes", Gemm.B_AT), of)
    by_batch, by_row, by_column = (f.test("eq", split, i) for i in (BATCH, ROWS, COLUMNS))
    b0, b1 = f.choose(by_batch, "i64", "%begin", "0"), f.choose(by_batch, "i64", "%end", batch)
    m0, m1 = f.choose(by_row, "i64", "%begin", "0"), f.choose(by_row, "i64", "%end", m)
    n0, n1 = f.choose(by_column, "i64", "%begin", "0"), f.choose(by_column, "i64", "%end", n)

    def one(i: str, m0: str, m1: str, n0: str, n1: str) -> None:
        at = [f.at(a, f.mul(i, sa)), f.at(b, f.mul(i, sb), of), f.at(c, f.mul(i, sc))]
        given = (
            f"ptr {at[0]}, i64 {lda}, ptr {at[1]}, i64 {ldb}, ptr {at[2]}, i64 {ldc}, i64 {m0}, i64 {m1}, i64 {n0}, "
            f"i64 {n1}, i64 {k}, ptr {bias}, i64 0, ptr %scratch"
        )
        for kind in forms:
            wanted = f.test("eq", form, gemm.FORMS.index(kind))
            f.when(wanted, lambda kind=kind: f.do(f"call void @ag_gemm_{kind}({given})"))  # type: ignore[misc]

    f.leave(f.test("eq", split, BANDS), lambda: each_band(f, partial(one, "0")))
    f.loop(b0, b1, 1, lambda i: one(i, m0, m1, n0, n1))
    return f.text()


def step_bfloat16() -> str:
    """As step_gemm, in bfloat16; PACKED: 1 where b is packed (bfloat16.py)."""
    f = Function("step_bfloat16", "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    a, b, c, bias = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(4))
    form, _, m, n, k, lda, ldb, ldc, sa, sb, sc, split = (f.word("%sizes", i) for i in range(1, 13))
    a, b, bias = (
        f.at(p, f.word("%sizes", i), "i16") for p, i in ((a, Gemm.A_AT), (b, Gemm.B_AT), (bias, Gemm.BIAS_AT))
    )
    packed = f.word("%sizes", Gemm.PACKED)

    def one(i: str, m0: str, m1: str, n0: str, n1: str) -> None:
        at = [f.at(p, f.mul(i, apart), "i16") for p, apart in ((a, sa), (b, sb), (c, sc))]
        given = (
            f"ptr {at[0]}, i64 {lda}, ptr {at[1]}, i64 {ldb}, ptr {at[2]}, i64 {ldc}, i64 {m0}, i64 {m1}, i64 {n0}, "
            f"i64 {n1}, i64 {k}, ptr {bias}, i64 {packed}, ptr %scratch"
        )
        for name in gemm.BFLOAT16_FORMS:
            f.when(f.test("eq", form, gemm.FORMS.index(name)), partial(f.call, f"@ag_gemm_{name}", given))

    f.leave(f.test("eq", split, BANDS), lambda: each_band(f, partial(one, "0")))
    f.leave(f.test("eq", split, ROWS), lambda: one("0", "%begin", "%end", "0", n))
    f.loop("%begin", "%end", 1, lambda i: one(i, "0", m, "0", n))
    return f.text()


def each_band(f: Function, body: Callable[[str, str, str, str], None]) -> None:
    """body(first row, end, first column, end) for the parts of bands that jobs begin .. end - 1 are."""
    band, across, m, n = (f.word("%sizes", i) for i in (Gemm.BAND, Gemm.ACROSS, Gemm.M, Gemm.N))

    def part(number: str) -> None:
        start, row = f.mul(number, across), f.mul(number, band)
        n0, n1 = f.max(f.sub("%begin", start), 0), f.min(f.sub("%end", start), n)
        f.when(f.test("slt", n0, n1), lambda: body(row, f.min(f.add(row, band), m), n0, n1))

    f.loop(f.div("%begin", across), f.ceil("%end", across), 1, part)


def step_panels() -> str:
    """As step_gemm, with a weight in panels: a convolution of 1 × 1 whose pixels are the rows. Jobs that are columns come
    in whole panels."""
    f = Function("step_panels", "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    a, b, c, bias = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(4))
    a, bias = (f.at(p, f.word("%sizes", i), "float") for p, i in ((a, Gemm.A_AT), (bias, Gemm.BIAS_AT)))
    m, n, split = (f.word("%sizes", i) for i in (Gemm.M, Gemm.N, Gemm.SPLIT))
    dims = f.word("%sizes", Gemm.PANELS, "ptr")
    number = f.load("i64", f.at(dims, conv_last.TILE, "i64"))

    def multiply(tile: conv_last.ConvTile, m0: str, m1: str, n0: str, n1: str) -> None:
        which = f"i64 {m0}, i64 {m1}, i64 {f.div(n0, tile.panel)}, i64 {f.ceil(n1, tile.panel)}"
        given = f"ptr {a}, ptr {b}, ptr {bias}, ptr {c}, ptr {dims}, {which}, ptr %scratch"
        f.do(f"call void @{tile.named('product')}({given})")

    def by(tile: conv_last.ConvTile) -> None:
        f.leave(f.test("eq", split, BANDS), lambda: each_band(f, partial(multiply, tile)))
        f.leave(f.test("eq", split, ROWS), lambda: multiply(tile, "%begin", "%end", "0", n))
        multiply(tile, "0", m, "%begin", "%end")

    for tile in conv_last.these_tiles():
        f.leave(f.test("eq", number, tile.number), partial(by, tile))
    return f.text()


def step_attention() -> str:
    """args: q, k, v, mask, out, lse; sizes: the scale's bits, where q, k, v, mask begin (bytes), ag_attention's dims."""
    f = Function("step_attention", "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    q, k, v, mask, out, lse = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(6))
    scale = f.op(f"load float, ptr {f.at('%sizes', 1, 'i64')}")
    q, k, v, mask = (f.at(p, f.word("%sizes", i), "i8") for i, p in enumerate((q, k, v, mask), 2))
    dims = f.at("%sizes", 6, "i64")
    operands = ", ".join(f"ptr {p}" for p in (q, k, v, mask, out, dims))
    f.do(f"call void @ag_attention({operands}, float {scale}, i64 %begin, i64 %end, ptr %scratch, ptr {lse})")
    return f.text()


class ConvLast:
    """The sizes of a convolution with channels last, behind the error word: where x, w and bias begin (in bytes), then
    conv_last.DIMS, or conv_bfloat16.DIMS."""

    X_AT, W_AT, BIAS_AT, DIMS = range(1, 5)


def step_conv(name: str = "step_conv", function: str = "ag_conv_last") -> str:
    """args: x, w, bias, out."""
    f = Function(name, "ptr %args, ptr %sizes, i64 %begin, i64 %end, ptr %scratch", exported=True)
    x, w, bias, out = (f.word(f.word("%args", i, "ptr"), 0, "ptr") for i in range(4))
    places = ((x, ConvLast.X_AT), (w, ConvLast.W_AT), (bias, ConvLast.BIAS_AT))
    operands = ", ".join(f"ptr {f.at(p, f.word('%sizes', i), 'i8')}" for p, i in places)
    dims = f.at("%sizes", ConvLast.DIMS, "i64")
    rest = f"ptr {out}, ptr {dims}, i64 %begin, i64 %end, ptr %scratch"
    f.do(f"call void @{function}({operands}, {rest})")
    return f.text()


class Family(LazyCode):
    """Steps, and these of the functions of a module that they call."""

    def __init__(self, module: ModuleType, *names: str, **steps: Callable[[], str]) -> None:
        self.module, self.steps, self.names = module, steps, (*steps, *names)
        super().__init__(Unit(self.source, self.names, name=f"{module.__name__} {self.names[0]}"))

    def source(self) -> str:
        return "\n".join([self.module.source(), *(step() for step in self.steps.values())])


def product(*forms: str) -> Family:
    name = f"step_{forms[0]}" if len(forms) == 1 else "step_gemm"
    return Family(gemm, **{name: partial(step_gemm, name, forms)})


CONVOLUTION = Family(conv_last_kernels, "ag_conv_pack", step_conv=step_conv)
PANELS = Family(conv_last_kernels, "ag_conv_pack", step_panels=step_panels)
LINEAR, BY_COLUMNS, GRADIENT, ANY_FORM = (product(*f) for f in (("nt",), ("nn",), ("tn",), gemm.FLOAT_FORMS))
GROUPED = Family(gemm, step_grouped=lambda: experts.step_grouped(Gemm.WORDS))
ATTENTION = Family(attention, "ag_attention_jobs", "ag_attention_scratch", step_attention=step_attention)
HALVES = Family(halves, step_halves=partial(step_gemm, "step_halves", tuple(gemm.ELEMENTS)))
BFLOAT16 = Family(bfloat16, *bfloat16.EXPORTS, step_bfloat16=step_bfloat16)
CONV_BFLOAT16 = Family(
    conv_bfloat16, *conv_bfloat16.EXPORTS, step_conv_bfloat16=partial(step_conv, "step_conv_bfloat16", "ag_conv_bf16")
)
FLOAT32 = (PANELS, CONVOLUTION, LINEAR, BY_COLUMNS, GRADIENT, ANY_FORM, GROUPED, ATTENTION)
FAMILIES = (*FLOAT32, HALVES, BFLOAT16, CONV_BFLOAT16)
FAMILIES_OF = {name: [f for f in FAMILIES if name in f.names] for family in FAMILIES for name in family.names}


def most_used() -> tuple[Family, ...]:
    """By most models, the first one soonest."""
    panels = (PANELS,) if vector_lanes() >= 8 else ()  # (panels.pay)
    return (LINEAR, *panels, ATTENTION, CONVOLUTION)


def sources() -> list[str]:
    """A text for each module of float32, with the steps of all families."""
    modules = {f.module: "" for f in FLOAT32}
    steps = {module: [step() for f in FLOAT32 if f.module is module for step in f.steps.values()] for module in modules}
    return ["\n".join([module.source(), *texts]) for module, texts in steps.items()]


def family_of(name: str) -> Family:
    """One that has this kernel; if possible, one that is compiled."""
    families = FAMILIES_OF[name]
    return next((family for family in families if family.built is not None), families[0])


def kernel(name: str) -> int:
    """Its address. Compiles its family if nothing of it was needed before."""
    return family_of(name)[name]


def begin(names: Iterable[str]) -> None:
    """Compile their families side by side, as far as nobody does."""
    for family in {family_of(name): None for name in names}:
        family.begin()


def name_of(address: int) -> str:
    """Of a kernel, by what `kernel` gave."""
    return next(n for f in FAMILIES if f.built is not None for n in f.names if f.built[n] == address)
