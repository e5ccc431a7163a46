"""Steps of a plan as native functions with what they are to be given: `NativeStep`s. Kernels are compiled here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from airgraph.engine.native.image import KernelName
from airgraph.engine.native.kernels.gemm import BFLOAT16_FORMS, FLOAT_FORMS, FORMS
from airgraph.engine.native.kernels.loops import Compiled, module_text, render, render_block, render_epilogue
from airgraph.engine.native.kernels.shared_kernels import Gemm, begin, kernel, product_step
from airgraph.engine.native.llvm.jit import LazyCode, Unit
from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import expand, same
from airgraph.plan.steps import AttentionStep, CallStep, ConvStep, GemmStep, LoopStep, MaskKind, Matrix, Plan, Step
from airgraph.plan.tensors import Tensor

MODULES = 2  # the compiler runs on two cores
HALF_FORMS = {DataType.DT_BF16: "nt_bf16", DataType.DT_FLOAT16: "nt_half"}  # by the type of the weight
SMALL = 30_000  # characters of LLVM text that one module holds: each module has memory maps of its own


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A loop kernel that is compiled, or will be. Its machine code is unloaded with the last step that uses it."""

    code: LazyCode | None  # None: another program is to have it
    function: KernelName

    @property
    def address(self) -> int:
        return self.code[self.function.name] if self.code is not None else 0


CompileKernels = Callable[[Iterable[Compiled]], "dict[str, CompiledKernel]"]
_known: WeakValueDictionary[str, CompiledKernel] = WeakValueDictionary()  # by their text: equal kernels are one


@dataclass(eq=False)
class NativeStep:
    """One call of a native function. `sizes` come behind the error word; None in `args` is a null address."""

    kind: str  # loop | prologue | gemm | bfloat16 | epilogue | grouped | attention | conv | conv_bfloat16 | call
    args: list[Tensor | None]
    sizes: list[Any]
    jobs: Dim
    unit: int
    cost: Dim
    origin: Step
    symbol: KernelName | None = None  # where the function is; None for a call
    checks: bool = False  # it may find an index out of range, or a divisor that is 0
    scratch: int = 0  # bytes for each thread, of a loop
    kernel: CompiledKernel | None = None  # keeps the function loaded

    def address(self) -> int:
        """Of its function, when that is compiled; 0 for a call."""
        if self.kernel is not None:
            return self.kernel.address
        return kernel(self.symbol.name) if self.symbol is not None else 0


def native_steps(plan: Plan, compile: CompileKernels | None = None, tuned: bool = False) -> list[NativeStep]:
    """`compile`: makes functions of the loops' texts; by default `compile_kernels`, for this process. `tuned`: products
    are timed."""
    begin("step_attention" for step in plan.steps if isinstance(step, AttentionStep))
    begin(conv_name(step) for step in plan.steps if isinstance(step, ConvStep))
    begin(gemm_name(step, tuned) for step in plan.steps if isinstance(step, GemmStep))
    loops = {step: [render(nest) for nest in step.nests] for step in plan.steps if isinstance(step, LoopStep)}
    products = [s for s in plan.steps if isinstance(s, GemmStep)]
    loops |= {loop: [render(nest) for nest in loop.nests] for s in products if (loop := s.prologue) is not None}
    loops |= {
        loop: [render_epilogue(nest) for nest in loop.nests] for s in products if (loop := s.epilogue) is not None
    }
    convolutions = [s for s in plan.steps if isinstance(s, ConvStep)]
    loops |= {
        loop: [render_block(nest) if by_channel(loop) else render(nest) for nest in loop.nests]
        for s in convolutions
        if (loop := s.epilogue) is not None
    }
    found = (compile or compile_kernels)(c for parts in loops.values() for c in parts)
    steps: list[NativeStep] = []
    for step in plan.steps:
        match step:
            case LoopStep():
                steps += [loop_step(step, c, found[c.body]) for c in loops[step]]
            case GemmStep():
                if step.prologue is not None:
                    (c,) = loops[step.prologue]
                    steps.append(fused_step("prologue", step, c, found[c.body]))
                steps.append(gemm_step(step, tuned))
                if step.epilogue is not None:
                    (c,) = loops[step.epilogue]
                    steps.append(fused_step("epilogue", step, c, found[c.body]))
            case AttentionStep():
                steps.append(attention_step(step))
            case ConvStep():
                steps.append(conv_step(step))
                if step.epilogue is not None:
                    (c,) = loops[step.epilogue]
                    steps.append(fused_step("epilogue", step, c, found[c.body]))
            case CallStep():
                steps.append(NativeStep("call", [], [], 0, 1, 0, step))
    return steps


# -- loops ------------------------------------------------------------------------------------------------------------
def by_channel(epilogue: LoopStep) -> bool:
    """Whether the epilogue of a convolution has loops over pixels and channels; else it has one over elements."""
    return len(epilogue.domain.shape) == 2


def loop_step(step: LoopStep | GemmStep | ConvStep, c: Compiled, kernel: CompiledKernel) -> NativeStep:
    return NativeStep(
        "loop", [*c.tensors], [*c.sizes], c.jobs, c.unit, c.cost, step, kernel.function, c.checks, c.scratch, kernel
    )


def fused_step(kind: str, product: GemmStep | ConvStep, c: Compiled, kernel: CompiledKernel) -> NativeStep:
    """A loop of a product: threads have the same shares of both, and do not wait in between (frames.sized_steps). That of a
    convolution is called by the convolution."""
    found = loop_step(product, c, kernel)
    found.kind = kind
    return found


def compile_kernels(wanted: Iterable[Compiled]) -> dict[str, CompiledKernel]:
    """By their text. New ones are compiled, distributed over a few modules of about the same size, side by side: meanwhile
    PyTorch ends what it does for a new graph, and the first call waits for them."""
    every = {c.body: c for c in wanted}
    found = {body: kernel for body in every if (kernel := _known.get(body)) is not None}
    new = [c for body, c in every.items() if body not in found]
    if not new:
        return found
    named = {f"k{i}": c for i, c in enumerate(new)}
    amount = 1 if sum(len(c.body) for c in new) < SMALL else min(MODULES, len(named))
    modules: list[dict[str, Compiled]] = [{} for _ in range(amount)]
    for name, c in sorted(named.items(), key=lambda item: len(item[1].body), reverse=True):
        min(modules, key=lambda m: sum(len(c.body) for c in m.values()))[name] = c
    for m in modules:
        code = LazyCode(Unit(module_text(m), tuple(m)))
        digest = code.unit.key().digest
        code.begin()
        for name, c in m.items():
            found[c.body] = _known[c.body] = CompiledKernel(code, KernelName(digest, name))
    return found


# -- matrix products --------------------------------------------------------------------------------------------------
def unit_stride(matrix: Matrix, axis: int, size: Dim) -> bool:
    return same(matrix.strides[axis], 1) or same(size, 1)


def gemm_form(step: GemmStep) -> tuple[int, Dim, Dim]:
    """Which of gemm.FORMS it is, with the leading dimensions of both operands."""
    _, m, n, k = step.sizes
    a, b = step.a, step.b
    a_plain, b_plain = unit_stride(a, 2, k), unit_stride(b, 2, n)
    b_transposed = unit_stride(b, 1, k)
    rows = lambda matrix, axis, size, other: other if same(size, 1) else matrix.strides[axis]  # noqa: E731
    nt, nn, tn = map(FORMS.index, BFLOAT16_FORMS if a.tensor.dtype == DataType.DT_BF16 else FLOAT_FORMS)
    if a.tensor.dtype != b.tensor.dtype:
        form = HALF_FORMS[b.tensor.dtype]
        assert a_plain and b_transposed
        return FORMS.index(form), rows(a, 1, m, k), rows(b, 2, n, k)
    if a_plain and b_transposed and not (b_plain and same(k, 1)):
        return nt, rows(a, 1, m, k), rows(b, 2, n, k)
    if a_plain and b_plain:
        return nn, rows(a, 1, m, k), rows(b, 1, k, n)
    if unit_stride(a, 1, m) and b_plain:
        return tn, rows(a, 2, k, m), rows(b, 1, k, n)
    raise AssertionError("the plan left a product of two transposed matrices")


def gemm_name(step: GemmStep, tuned: bool) -> str:
    return "step_grouped" if step.ends else product_step(gemm_form(step)[0], tuned)


def gemm_step(step: GemmStep, tuned: bool) -> NativeStep:
    form, lda, ldb = gemm_form(step)
    batch, m, n, k = step.sizes
    bias_at = step.bias.offset if step.bias else 0
    sizes = [
        form,
        batch,
        m,
        n,
        k,
        lda,
        ldb,
        n,
        step.a.strides[0],
        step.b.strides[0],
        expand(m * n),
        None,
        step.a.offset,
        step.b.offset,
        bias_at,
        *[0] * (Gemm.WORDS - Gemm.BLOCK),
    ]
    args = [step.a.tensor, step.b.tensor, step.out, step.bias.tensor if step.bias else None]
    if step.ends:
        args, sizes = [*args, step.ends.tensor], [*sizes, step.ends.offset]
    name = gemm_name(step, tuned)
    kind = "grouped" if step.ends else "bfloat16" if name == "step_bfloat16" else "gemm"
    return NativeStep(kind, args, sizes, 0, 1, 0, step, KernelName("", name))


def attention_step(step: AttentionStep) -> NativeStep:
    b, h, hk, lq, lk, d, dv = step.sizes
    q, k, v, mask = step.q, step.k, step.v, step.mask
    out = (expand(h * lq * dv), expand(lq * dv), dv)
    masked = mask.strides if mask else (0, 0, 0, 0)
    dims = [
        b,
        h,
        hk,
        lq,
        lk,
        d,
        dv,
        int(step.causal),
        int(step.mask_kind),
        *q.strides[:3],
        *k.strides[:3],
        *v.strides[:3],
        *out,
        *masked,
    ]
    offsets = [expand(4 * x.offset) for x in (q, k, v)] + [
        expand((1 if step.mask_kind is MaskKind.EXCLUDES else 4) * mask.offset) if mask else 0
    ]
    args = [q.tensor, k.tensor, v.tensor, mask.tensor if mask else None, step.out, step.lse]
    cost = expand(b * h * lq * lk * (d + dv))
    words, function = [("float", step.scale), *offsets, *dims], KernelName("", "step_attention")
    return NativeStep("attention", args, words, 0, 1, cost, step, function)


def conv_name(step: ConvStep) -> str:
    return "step_conv_bfloat16" if step.x.tensor.dtype == DataType.DT_BF16 else "step_conv"


def conv_step(step: ConvStep) -> NativeStep:
    """(What the threads divide depends on their number: frames.py.)"""
    s, name = step.sizes, conv_name(step)
    size_of = 2 if name == "step_conv_bfloat16" else 4
    offsets = [size_of * m.offset if m else 0 for m in (step.x, step.w, step.bias)]
    args = [step.x.tensor, step.w.tensor, step.bias.tensor if step.bias else None, step.out]
    cost = s.n * s.o * s.oh * s.ow * (s.c // s.groups) * s.kh * s.kw // 4
    words = [*offsets, *step.x.strides]
    return NativeStep(name.removeprefix("step_"), args, words, 0, 1, cost, step, KernelName("", name))
