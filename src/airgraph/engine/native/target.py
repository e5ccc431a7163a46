"""What the native engine plans for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from airgraph.ir.types import DataType
from airgraph.plan.conv_gradients import FilterGradient
from airgraph.plan.opaque import Attention, Convolution, KernelStep, Product
from airgraph.plan.target import Target, WidenLimits
from airgraph.plan.tensors import Tensor
from airgraph.plan.text import type_name
from airgraph.plan.widening import BF16, HALF, HALVES

EPILOGUES = 6  # additions, with AVX-512; see plan/steps.GemmStep for what was measured
PROLOGUE_COLUMNS = 512  # with AVX-512
# With AMX. PyTorch's time / ours in float32, a Xeon (Emerald Rapids), torch 2.13. Convolutions in one group where AMX
# cannot be used by us (else conv_bfloat16.py and bfloat16.py have them), two threads, two one after the other, both
# together: 3×3 of 32 channels at 14², 4 M multiplications, 2.8; of 256 at 14², 231 M, 1.2; of 64 at 56², 231 M, 0.9, a
# batch of 16 of these 1.4; 1×1 256→64→64 at 56², 64 M, 0.8; 1024→256→256 at 14², 64 M, 1.0, a batch of 16 0.4. Of groups,
# one thread, images that lie channels last: depthwise 3×3 of 96 channels at 14², 0.2 M, 9; of 240 at 28², 1.7 M, 0.9; of
# 96 at 56², 2.7 M, 0.7; 5×5 of 960 at 7², 1.2 M, 7; of 480 at 14², 2.4 M, 1.3; 32 groups, 3×3 of 512 at 7², 3.6 M, 2.4,
# of 256 at 14², 0.8, of 128 at 28², 0.5, at 56², 14 M, 0.3. Attention by heads × queries × keys of 64, two threads:
# 4×48×48 1.3, 8×64×64 0.9 (causal 1.15), 12×128×128 0.7 (1.0), 12×512×512 0.4; 8×1×256 1.3, 8×1×512 0.3. In a model small
# ones gain more, since no call splits the parallel region: BERT of 4 layers with 48 tokens 1.49, a Llama's prefill of 64
# tokens 1.15.
WITH_AMX = WidenLimits(convolution=32 << 20, grouped=4 << 20, attention=4 << 20, keys=256 << 10)
# The gradient of a convolution's weight with AMX, which packs panels of all pixels at once. PyTorch's time / ours, a Xeon
# (Emerald Rapids), torch 2.11, one thread: 3×3 of 32 channels, 16 × 14², 1.3, of 64 at 7² 1.6, of 128 at 4² 1.9, of 512 at
# 7² 1.9; 4 images of 256 at 14² 0.9, of 128 at 28² (3,600 pixels) 0.7, of 64 at 56² (13,000) 0.3; 256 → 512 with stride 2
# at 14² 3.0; 1×1 of 1024 → 256, 16 × 14², 2.5. Gradients of images, which are convolutions: 0.8 to 3.7.
PIXELS = 4096
SINGLE, MASKS = (DataType.DT_FLOAT,), (DataType.DT_FLOAT, DataType.DT_BOOL)


@dataclass(frozen=True)
class CpuTarget(Target):
    """A CPU: the engine's own matrix products, attention and convolutions are of float32; products of few rows may have a
    weight in half precision, and with AMX there are products and convolutions in bfloat16. `without_amx`: why there are
    none."""

    without_amx: str = ""

    def refuses(self, step: KernelStep) -> str | None:
        from airgraph.engine.native.kernels import conv_last  # needs LLVM

        match step:
            case Product() if step.a.dtype in HALVES:
                if step.a.dtype not in self.multiplies:
                    why = f": {self.without_amx}" if step.a.dtype == BF16 and self.without_amx else ""
                    return f"there is no kernel for {type_name(step.a.dtype)}{why}"
                operands = [*step.operands, step.out]
                return "a product of experts in half precision" if step.ends else not_among((BF16,), operands)
            case Product():
                weights = HALVES if step.b.dtype != step.a.dtype and step.ends is None else ()
                others = [t for t in step.operands if t is not step.ends and t is not step.b]
                return not_among(SINGLE, others) or not_among((*SINGLE, *weights), [step.b])
            case Attention():
                if step.more:
                    return "attention of which more is read than the output and the sums"
                masks = [] if step.mask is None else [step.mask]
                return not_among(SINGLE, [step.q, step.k, step.v]) or not_among(MASKS, masks)
            case FilterGradient() if step.x.dtype in self.multiplies:
                long = "a sum over so many pixels in bfloat16" if step.pixels > PIXELS else None
                return long or not_among((BF16,), step.operands)
            case FilterGradient():
                return not_among(SINGLE, step.operands)
            case Convolution() if step.x.dtype in self.multiplies:
                return "a convolution of groups" if step.sizes.groups > 1 else not_among((BF16,), step.operands)
            case Convolution():
                return not_among(SINGLE, step.operands) or conv_last.refuses(step.sizes)


def not_among(dtypes: tuple[DataType, ...], tensors: list[Tensor]) -> str | None:
    """Which element type there is no kernel for; None: there is one for all."""
    return next((f"there is no kernel for {type_name(t.dtype)}" for t in tensors if t.dtype not in dtypes), None)


@cache
def this_cpu() -> CpuTarget:
    """This machine's CPU: loops of eight lanes (two vectors of NEON, one of AVX2), or of sixteen with AVX-512.

    Sixteen were 1.4 to 2 times as fast as eight on a Xeon for chains of norms and of activations, and equal for models
    of matrix products.
    Where AMX cannot be used by us (`without_amx`), products in bfloat16 are left to PyTorch, and most convolutions.
    """
    from airgraph.engine.native.llvm import cpu  # needs LLVM

    lanes, refused, amx = cpu.vector_lanes(), cpu.why_no_amx() or "", cpu.multiplies_bfloat16()
    return CpuTarget(
        "cpu",
        lanes=max(8, lanes),
        channels_last=True,
        images_last=True,
        conv_gradients=True,
        epilogues=EPILOGUES if lanes >= 8 else 0,
        conv_epilogues=True,
        prologue_columns=PROLOGUE_COLUMNS if lanes == 16 else 0,
        widens=(HALF,) if amx else HALVES,
        multiplies=() if refused else (BF16,),
        without_amx=refused,
        widen_rows=1 if cpu.lacks_halves() else CpuTarget.widen_rows,
        widens_convolutions=HALVES,
        widens_attention=HALVES if cpu.lacks_halves() else (BF16,) if amx else (),
        widened=WITH_AMX if amx else None,
    )
