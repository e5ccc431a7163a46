"""Nests in, Triton source out, as text. Needs neither Triton nor a GPU."""

from __future__ import annotations

import ast
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, TestedEngine

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.cuda import CudaEngine
from airgraph.engine.cuda.attention import AttentionSource
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.cuda.functions import RENDERED
from airgraph.engine.cuda.order import grouped
from airgraph.engine.cuda.render import Merged, render
from airgraph.engine.cuda.target import GPU
from airgraph.ir.boundary import Boundary, Fresh, Layout, TensorIn
from airgraph.ir.text import from_py
from airgraph.ir.types import DataType, TensorType
from airgraph.plan.functions import FUNCTIONS
from airgraph.plan.groups import make_plan
from airgraph.plan.index import strides_of
from airgraph.plan.kernels import build
from airgraph.plan.nest import schedule
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import ConvStep, LoopStep, step_reads
from airgraph.plan.tensors import buffer, point
from airgraph.plan.text import plan_text


def plan(text, **shapes):
    """`shapes`: of the results of ops whose shapes no rule tells."""
    graph = from_py(textwrap.dedent(text))
    for name, shape in shapes.items():
        (node,) = [n for n in graph.nodes if n.name == name]
        for output, sizes in zip(node.outputs, shape):
            output.type = TensorType(node.inputs[0].dtype, sizes, "NPU")
    inputs = [TensorIn(n.name, n.output.type, strides_of(n.output.type.shape), "cpu") for n in graph.inputs]
    outputs = [
        Fresh(i, Layout(v.type.shape, strides_of(v.type.shape)), "cpu") for i, v in enumerate(graph.net_output.values())
    ]
    return make_plan(graph, Boundary(inputs, outputs), GPU)


def sources(text):
    return [render(nest) for step in plan(text).steps for nest in step.nests]


def body(source):
    ast.parse(source.text)
    return textwrap.dedent(source.body).strip()


def same(found, wanted):
    assert found.strip() == textwrap.dedent(wanted).strip()


def test_every_function_of_plans_is_rendered():
    assert FUNCTIONS.keys() == RENDERED


LAYERS = """
    x_0 = ge.Data(index=0, dtype=0, shape=[96, 128], placement="NPU", node_name="x")
    w_0 = ge.Data(index=1, dtype=0, shape=[128, 128], placement="NPU", node_name="w")
    a_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="a")
    b_0 = ge.MatMulV2(a_0, w_0, None, None, node_name="b")
    c_0 = ge.SoftmaxV2(b_0, axes=[-1], node_name="c")
    d_0 = ge.MatMulV2(c_0, w_0, None, None, node_name="d")
    e_0 = ge.SoftmaxV2(d_0, axes=[-1], node_name="e")
    f_0 = ge.Transpose(b_0, [1, 0], node_name="f")
    g_0 = ge.Transpose(d_0, [1, 0], node_name="g")
    _ = ge.NetOutput([e_0, f_0, g_0], dependencies=[])
"""


def test_equal_loops_of_a_plan_that_was_read_are_rendered_once():
    made = plan(LAYERS)
    read = parse_plan(plan_text(made), made.graph, made.boundary, GPU)
    nests = [nest for step in read.steps if isinstance(step, LoopStep) for nest in step.nests]
    known = {}
    found = [render(nest, known) for nest in nests]
    assert len(known) < len(nests) and sum(nest.like is not None for nest in nests) == len(nests) - len(known)
    for nest, source in zip(nests, found):
        for one, own in zip(every(source), every(render(replace(nest, like=None))), strict=True):
            assert (one.text, one.tensors, one.tile) == (own.text, own.tensors, own.tile)
            assert (one.sizes, one.elements, one.programs) == (own.sizes, own.elements, own.programs)


def every(source):
    return [source, *source.alternatives()]


def test_elementwise_chain():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=1, shape=[40, 80], placement="NPU", node_name="x")
        b_0 = ge.Data(index=1, dtype=1, shape=[80], placement="NPU", node_name="b")
        Add_0 = ge.Add(x_0, b_0, node_name="Add")
        Gelu_0 = ge.Gelu(Add_0, node_name="Gelu")
        _ = ge.NetOutput([Gelu_0], dependencies=[])
    """)
    same(
        source.text,
        """
        from airgraph.engine.cuda.helpers import *


        @triton.jit
        def kernel(p0, p1, p2, INDEX: tl.constexpr, XBLOCK: tl.constexpr, EARLY: tl.constexpr):
            begin(EARLY)
            pid = tl.program_id(0)
            zero = tl.zeros([1], INDEX)
            x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)
            v1 = tl.load(p0 + (x)).to(tl.float32)
            v2 = tl.load(p1 + ((x % 80))).to(tl.float32)
            v3 = (v1 + v2).to(tl.float16).to(tl.float32)
            v4 = v3
            v5 = tl.full([1], 0.5, tl.float32)
            v6 = v4 * v5
            v7 = tl.full([1], 1.0, tl.float32)
            v8 = tl.full([1], 0.7071067811865476, tl.float32)
            v9 = v4 * v8
            v10 = libdevice.erf(v9)
            v11 = v7 + v10
            v12 = v6 * v11
            v13 = v12.to(tl.float16).to(tl.float32)
            tl.store(p2 + (x), (v13).to(tl.float16))
    """,
    )


def test_softmax_reads_its_row_once():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=0, shape=[400, 250], placement="NPU", node_name="x")
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
    """)
    assert source.tile.whole
    same(
        body(source),
        """
        zero = tl.zeros([1, 1], INDEX)
        x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        r = tl.arange(0, RBLOCK)[None, :].to(INDEX)
        rmask = r < 250
        v1 = tl.load(p0 + (x * 250 + r), rmask, other=0)
        v2 = tl.reduce(tl.where(rmask, (tl.broadcast_to(v1, [XBLOCK, RBLOCK])).to(tl.float32), float("-inf")).to(tl.float32), 1, nan_max, keep_dims=True)
        v3 = v1 - v2
        v4 = libdevice.exp(v3)
        v5 = tl.sum(tl.where(rmask, (tl.broadcast_to(v4, [XBLOCK, RBLOCK])).to(tl.float32), 0).to(tl.float32), axis=1, keep_dims=True).to(tl.float32)
        v6 = tl.div_rn(tl.full([], 1.0, tl.float32), v5)
        v7 = v4 * v6
        tl.store(p1 + (x * 250 + r), (v7).to(tl.float32), rmask)
    """,
    )


def test_a_long_row_is_read_once_per_stage():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=0, shape=[300, 40000], placement="NPU", node_name="x")
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="SoftmaxV2")
        _ = ge.NetOutput([SoftmaxV2_0], dependencies=[])
    """)
    same(
        body(source),
        """
        zero = tl.zeros([1, 1], INDEX)
        x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        a1 = tl.full([XBLOCK, RBLOCK], float("-inf"), tl.float32)
        for start in range(0, 40000, RBLOCK):
            r = (start + tl.arange(0, RBLOCK))[None, :].to(INDEX)
            rmask = r < 40000
            v1 = tl.load(p0 + (x * 40000 + r), rmask, other=0)
            a1 = nan_max(a1, tl.where(rmask, (tl.broadcast_to(v1, [XBLOCK, RBLOCK])).to(tl.float32), float("-inf")).to(tl.float32))
        v2 = tl.reduce(a1, 1, nan_max, keep_dims=True)
        a4 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
        for start in range(0, 40000, RBLOCK):
            r = (start + tl.arange(0, RBLOCK))[None, :].to(INDEX)
            rmask = r < 40000
            v3 = tl.load(p0 + (x * 40000 + r), rmask, other=0)
            v4 = v3 - v2
            v5 = libdevice.exp(v4)
            a4 = a4 + tl.where(rmask, (tl.broadcast_to(v5, [XBLOCK, RBLOCK])).to(tl.float32), 0).to(tl.float32)
        v6 = tl.sum(a4, axis=1, keep_dims=True).to(tl.float32)
        v10 = tl.div_rn(tl.full([], 1.0, tl.float32), v6)
        for start in range(0, 40000, RBLOCK):
            r = (start + tl.arange(0, RBLOCK))[None, :].to(INDEX)
            rmask = r < 40000
            v7 = tl.load(p0 + (x * 40000 + r), rmask, other=0)
            v8 = v7 - v2
            v9 = libdevice.exp(v8)
            v11 = v9 * v10
            tl.store(p1 + (x * 40000 + r), (v11).to(tl.float32), rmask)
    """,
    )


def test_norm():
    """One tile for both passes over the row, in float32, rounded at the end."""
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=27, shape=[64, 128], placement="NPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=27, shape=[128], placement="NPU", node_name="w")
        Cast_0 = ge.Cast(x_0, dst_type=0, node_name="Cast")
        Mul_0 = ge.Mul(Cast_0, Cast_0, node_name="Mul")
        ReduceMean_0 = ge.ReduceMean(Mul_0, [1], keep_dims=True, node_name="ReduceMean")
        Rsqrt_0 = ge.Rsqrt(ReduceMean_0, node_name="Rsqrt")
        Mul_1_0 = ge.Mul(Cast_0, Rsqrt_0, node_name="Mul_1")
        Cast_1_0 = ge.Cast(Mul_1_0, dst_type=27, node_name="Cast_1")
        Mul_2_0 = ge.Mul(Cast_1_0, w_0, node_name="Mul_2")
        _ = ge.NetOutput([Mul_2_0], dependencies=[])
    """)
    same(
        body(source),
        """
        zero = tl.zeros([1, 1], INDEX)
        x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        r = tl.arange(0, RBLOCK)[None, :].to(INDEX)
        v1 = tl.load(p0 + (x * 128 + r)).to(tl.float32)
        v2 = v1
        v3 = v2 * v2
        v4 = tl.sum((tl.broadcast_to(v3, [XBLOCK, RBLOCK])).to(tl.float32), axis=1, keep_dims=True).to(tl.float32)
        v5 = tl.full([1, 1], 128.0, tl.float32)
        v6 = tl.div_rn(v4, v5)
        v7 = libdevice.rsqrt(v6)
        v8 = v2 * v7
        v9 = v8.to(tl.bfloat16).to(tl.float32)
        v10 = tl.load(p1 + (r)).to(tl.float32)
        v11 = (v9 * v10).to(tl.bfloat16).to(tl.float32)
        tl.store(p2 + (x * 128 + r), (v11).to(tl.bfloat16))
    """,
    )


def test_columns_are_summed_by_neighbouring_threads():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=0, shape=[90, 330], placement="NPU", node_name="x")
        ReduceSum_0 = ge.ReduceSum(x_0, [0], keep_dims=False, node_name="ReduceSum")
        _ = ge.NetOutput([ReduceSum_0], dependencies=[])
    """)
    same(
        body(source),
        """
        zero = tl.zeros([1, 1], INDEX)
        x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        xmask = x < 330
        a1 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
        for start in range(0, 90, RBLOCK):
            r = (start + tl.arange(0, RBLOCK))[None, :].to(INDEX)
            rmask = r < 90
            v1 = tl.load(p0 + (x + r * 330), xmask & rmask, other=0)
            a1 = a1 + tl.where(rmask, (tl.broadcast_to(v1, [XBLOCK, RBLOCK])).to(tl.float32), 0).to(tl.float32)
        v2 = tl.sum(a1, axis=1, keep_dims=True).to(tl.float32)
        tl.store(p1 + (x), (v2).to(tl.float32), xmask)
    """,
    )


class Contiguous:
    def __call__(self, t):
        return (strides_of(t.shape), 0) if t.op == "buffer" else None

    def target(self, t):
        return strides_of(t.shape), 0


def test_symbolic_sizes_are_arguments():
    rows = sympy.Symbol("s0", integer=True, positive=True)
    x = buffer((rows, 8), DataType.DT_FLOAT, None)
    kernel, _ = build([point("relu", (x,), x.dtype)], Contiguous())
    source = render(schedule(kernel.parts[0], GPU))
    assert source.signature == {"p0": "*fp32", "p1": "*fp32", "s0": "i64"}
    assert source.sizes == (8 * rows,) and "xmask = x < s0" in source.text


TWO = """
    x_0 = ge.Data(index=0, dtype=27, shape=[1, 64], placement="NPU", node_name="x")
    y_0 = ge.Data(index=1, dtype=27, shape=[3, 5], placement="NPU", node_name="y")
    Relu_0 = ge.Relu(x_0, node_name="Relu")
    ReduceMax_0 = ge.ReduceMax(y_0, [1], keep_dims=False, node_name="ReduceMax")
    _ = ge.NetOutput([Relu_0, ReduceMax_0], dependencies=[])
"""


def groups(text):
    found = plan(text)
    rendered = {s: [render(nest) for nest in s.nests] for s in found.steps if isinstance(s, LoopStep)}
    return [
        [source for step in group.units for source in rendered[step]] for group in grouped(found.steps, rendered, id_of)
    ]


def id_of(t):
    return t.id


def test_small_loops_are_launched_together():
    (group,) = groups(TWO)
    merged = Merged(tuple(group))
    ast.parse(merged.text)
    assert len(group) == 2 and merged.grid(int) == sum(s.grid(int) for s in group)
    assert list(merged.signature) == ["p0", "p1", "p2", "p3", "s0", "s1"]


def test_what_depends_on_another_loop_comes_after_it():
    found = groups("""
        x_0 = ge.Data(index=0, dtype=0, shape=[30, 64], placement="NPU", node_name="x")
        SoftmaxV2_0 = ge.SoftmaxV2(x_0, axes=[0], node_name="SoftmaxV2")
        SoftmaxV2_1_0 = ge.SoftmaxV2(SoftmaxV2_0, axes=[1], node_name="SoftmaxV2_1")
        _ = ge.NetOutput([SoftmaxV2_1_0], dependencies=[])
    """)
    assert [len(group) for group in found] == [1, 1]


def test_the_engine_says_why_it_does_not_serve():
    import torch

    engine = CudaEngine()
    assert "is on cpu" in engine.serves(torch.device("cpu"), "max-autotune")
    assert "replays PyTorch's own ops" in engine.serves(torch.device("cuda"), "reduce-overhead")
    with pytest.raises(Exception, match="the CUDA engine cannot run this graph"):
        torch.compile(lambda x: x + 1, backend=__import__("airgraph").backend(engine="cuda"))(torch.ones(2))


# -- layouts --------------------------------------------------------------------------------------------------------
def test_a_layout_change_is_done_in_square_tiles():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=1, shape=[100, 256], placement="NPU", node_name="x")
        y_0 = ge.Data(index=1, dtype=1, shape=[100], placement="NPU", node_name="y")
        Transpose_0 = ge.Transpose(x_0, [1, 0], node_name="Transpose")
        Add_0 = ge.Add(Transpose_0, y_0, node_name="Add")
        _ = ge.NetOutput([Add_0], dependencies=[])
    """)
    same(
        body(source),
        """
        zero = tl.zeros([1, 1], INDEX)
        across = tl.cdiv(100, XBLOCK)
        r = (pid // across).to(INDEX) * RBLOCK + tl.arange(0, RBLOCK)[None, :].to(INDEX)
        pid = pid % across
        x = pid.to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        xmask = x < 100
        v1 = tl.load(p0 + (x * 256 + r), xmask, other=0).to(tl.float32)
        v2 = tl.load(p1 + (x), xmask, other=0).to(tl.float32)
        v3 = (v1 + v2).to(tl.float16).to(tl.float32)
        tl.store(p2 + (x + r * 100), (v3).to(tl.float16), xmask)
    """,
    )
    assert source.grid(int) == 2 * 4


def test_a_number_for_each_row_makes_no_layout_change():
    (source,) = sources("""
        x_0 = ge.Data(index=0, dtype=1, shape=[100, 256], placement="NPU", node_name="x")
        y_0 = ge.Data(index=1, dtype=1, shape=[100, 1], placement="NPU", node_name="y")
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        _ = ge.NetOutput([Add_0], dependencies=[])
    """)
    assert not source.tile.blocks


def test_a_result_lies_as_its_reader_wants_it():
    found = plan("""
        x_0 = ge.Data(index=0, dtype=1, shape=[4, 8, 32], placement="NPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=1, shape=[8, 16], placement="NPU", node_name="w")
        Erf_0 = ge.Erf(x_0, node_name="Erf")
        Transpose_0 = ge.Transpose(Erf_0, [0, 2, 1], node_name="Transpose")
        Reshape_0 = ge.Reshape(Transpose_0, ge.Const([128, 8], dtype=9), node_name="Reshape")
        MatMulV2_0 = ge.MatMulV2(Reshape_0, w_0, None, None, node_name="MatMulV2")
        _ = ge.NetOutput([MatMulV2_0], dependencies=[])
    """)
    assert [p.strides for p in found.allocations.values() if p.kind == "arena"] == [(256, 1, 8)]
    assert len(found.steps) == 2


def test_attention_is_read_as_pytorch_lays_it_out():
    found = plan(
        """
        q_0 = ge.Data(index=0, dtype=1, shape=[2, 4, 16, 8], placement="NPU", node_name="q")
        w_0 = ge.Data(index=1, dtype=1, shape=[32, 32], placement="NPU", node_name="w")
        [A_0, A_1] = ge.FlashAttentionScore(q_0, q_0, q_0, None, scale_value=1.0, is_causal=False, node_name="A")
        Transpose_0 = ge.Transpose(A_0, [0, 2, 1, 3], node_name="Transpose")
        Reshape_0 = ge.Reshape(Transpose_0, ge.Const([32, 32], dtype=9), node_name="Reshape")
        MatMulV2_0 = ge.MatMulV2(Reshape_0, w_0, None, None, node_name="MatMulV2")
        _ = ge.NetOutput([MatMulV2_0], dependencies=[])
    """,
        A=[(2, 4, 16, 8)],
        Transpose=[(2, 16, 4, 8)],
    )
    assert [type(step).__name__ for step in found.steps] == ["CallStep", "CallStep"]


def test_the_bias_of_a_convolution_is_added_by_the_loop_behind_it():
    found = plan(
        """
        x_0 = ge.Data(index=0, dtype=1, shape=[2, 8, 16, 16], placement="NPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=1, shape=[8, 8, 3, 3], placement="NPU", node_name="w")
        b_0 = ge.Data(index=2, dtype=1, shape=[8], placement="NPU", node_name="b")
        Conv2D_0 = ge.Conv2D(x_0, w_0, b_0, strides=[1, 1, 1, 1], pads=[1, 1, 1, 1], dilations=[1, 1, 1, 1], groups=1, data_format="NCHW", node_name="Conv2D")
        Relu_0 = ge.Relu(Conv2D_0, node_name="Relu")
        _ = ge.NetOutput([Relu_0], dependencies=[])
    """,
        Conv2D=[(2, 8, 16, 16)],
        Relu=[(2, 8, 16, 16)],
    )
    (conv,) = [step for step in found.steps if isinstance(step, ConvStep)]
    *_, last = found.steps
    assert conv.bias is None and "b" in {p.source for p in map(found.allocation, step_reads(last))}


def test_what_costs_little_beyond_a_split_reduction_is_computed_again():
    """x - mean of a batch norm, for the variance and for the result: nothing of x's size is kept."""
    found = plan(
        """
        x_0 = ge.Data(index=0, dtype=0, shape=[16, 64, 112, 112], placement="NPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[64], placement="NPU", node_name="w")
        [y_0, y_1, y_2, y_3, y_4] = ge.BatchNormV3(x_0, w_0, w_0, w_0, w_0, epsilon=1e-05, momentum=0.1, is_training=True, node_name="y")
        _ = ge.NetOutput([y_0], dependencies=[])
    """,
        y=[(16, 64, 112, 112), *[(64,)] * 4],
    )
    sizes = [math.prod(p.tensor.shape) for p in found.allocations.values() if p.kind == "arena"]
    assert sizes and max(sizes) <= 64 * 16


class NoKernels:
    """Stands in for compile.DriverKernels where nothing is run."""

    def prepare(self, sources):
        self.sources = sources


def test_decoding_waits_for_all_it_loads_at_once():
    """An assertion, or a load that is exchanged between threads, would hold up the loads behind it."""
    seen = []

    class Rendering(TestedEngine):
        name = "rendering"

        def load(self, request):
            seen.append(CudaExecutable(request, NoKernels()))
            return seen[-1]

        def program(self, executable, programs):
            return lambda *args: [torch.zeros(2, 256)]

    register_engine(Rendering())
    try:
        function, args = CASES["decode"].build("cpu")
        torch.compile(function, backend=airgraph.backend(engine="rendering"))(*args)
    finally:
        del ENGINES["rendering"]
    (source,) = [s for s in seen[0].sources if isinstance(s, AttentionSource)]
    kernel = source.text.partition("def kernel(")[2]
    assert source.checks
    assert source.text.count("tl.device_assert") == kernel.partition("tl.atomic_add")[2].count("tl.device_assert") == 2
    assert source.text.count("def slot") == 1  # keys and values go to the same
    for i in range(source.unit.pieces):
        assert f"q{i} = tl.where(own[:, None], q{i}, 0.0)" in kernel
