"""torchair.scope: attributes in the graph and in its dumps, the order of work, and results that are eager's."""

import re

import npugraph_ex
import pytest
import torch
import torchair

from airgraph.api import graph_to_analyse, make_config
from airgraph.convert.scopes import STREAM
from airgraph.ir.text import from_py, same_graph, to_py
from airgraph.journal import JOURNALS

scope, ops = torchair.scope, torchair.ops
MODES = ["max-autotune", "reduce-overhead"]
STREAM_1 = {STREAM: "1", "_user_stream_priority": "0", "_enable_inner_parallel": "True"}


def compiled(f, mode="max-autotune", dynamic=False, **passes):
    config = torchair.CompilerConfig()
    config.mode = mode
    for name, function in passes.items():
        setattr(config, name, function)
    return torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True, dynamic=dynamic)


def graph_of(f, *args):
    """The GE graph of a function, as its converters make it."""
    found = []

    def backend(gm, inputs):
        def compiler(graph, example):
            found.append(graph_to_analyse(graph, example, make_config(None, {}))[0])
            return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

        return torch._functorch.aot_autograd.aot_module_simplified(gm, inputs, fw_compiler=compiler)

    torch._dynamo.reset()
    torch.compile(f, backend=backend, fullgraph=True)(*args)
    return found[0]


def node(graph, op):
    (only,) = graph.of(op)
    return only


def branches(x, y):
    a = x + y
    with scope.npu_stream_switch("1"):
        b = torch.relu(a @ y)
        with scope.limit_core_num(4, 8):
            c = b.sin()
    with scope.npu_stream_switch("2", 3), scope.op_never_timeout():
        d = a.exp()
    return c + d


X, Y = torch.randn(3, 3), torch.randn(3, 3)


# -- results --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("mode", MODES)
def test_results_are_eagers(mode, device):
    run = compiled(branches, mode)
    for _ in range(3):  # op by op, captured, replayed
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        torch.testing.assert_close(run(x.to(device), y.to(device)).cpu(), branches(x, y))


def test_outside_torch_compile():
    plain = (torch.relu((X + Y) @ Y)).sin() + (X + Y).exp()
    assert torch.equal(branches(X, Y), plain)
    assert torch.equal(branches(X.npu(), Y.npu()).cpu(), plain)
    with scope.super_kernel("k", "stream-fusion=1"), scope.super_kernel(None), scope.data_dump():
        assert scope.npu_wait_tensor(X, Y) is X


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "npugraph_ex"])
def test_other_backends(backend):
    torch.testing.assert_close(torch.compile(branches, backend=backend, fullgraph=True)(X, Y), branches(X, Y))


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    def f(x, y):
        with scope.npu_stream_switch("1"):
            z = scope.npu_wait_tensor(x, y) * y
        return (z * z).sum()

    ours, theirs = (torch.ones(3, requires_grad=True) for _ in range(2))
    y = torch.tensor([1.0, 2.0, 3.0])
    compiled(f, mode)(ours, y).backward()
    f(theirs, y).backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_sizes_that_change():
    run = compiled(branches, dynamic=True)
    for size in (3, 4, 5):
        x, y = torch.randn(size, size), torch.randn(size, size)
        torch.testing.assert_close(run(x, y), branches(x, y))


def test_a_backward_graph_has_no_scopes():
    """They would be entered without anything inside; and what was done once is not done again."""
    seen = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = lambda gm, inputs, cfg: seen.append({str(n.target) for n in gm.graph.nodes})
    run = torch.compile(branches, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    run(X.clone().requires_grad_(), Y).sum().backward()
    forward, backward = seen
    assert "air.scope_enter.default" in forward and "air.scope_enter.default" not in backward


# -- the graph ------------------------------------------------------------------------------------------------------
def test_nodes_carry_the_attributes_of_their_scopes():
    graph = graph_of(branches, X, Y)
    assert node(graph, "Relu").marks == STREAM_1
    assert node(graph, "Sin").marks == {**STREAM_1, "_op_aicore_num": "4", "_op_vectorcore_num": "8"}
    assert node(graph, "Exp").marks == {
        STREAM: "2",
        "_user_stream_priority": "3",
        "_enable_inner_parallel": "True",
        "_op_exec_never_timeout": True,
    }
    outside = [n for n in graph.of("Add") if not n.marks]
    assert len(outside) == 2 and all(not n.marks for n in graph.inputs)


def test_an_inner_scope_wins_and_a_super_kernel_can_be_ended():
    def f(x):
        with scope.super_kernel("k1", "feed-sync-all=1"), scope.npu_stream_switch("1"):
            a = x.sin()
            with scope.npu_stream_switch("2"), scope.super_kernel("k2"):
                b = x.cos()
                with scope.super_kernel(None):
                    c = x.exp()
            d = x.tan()
        return a, b, c, d

    graph = graph_of(f, X)
    marks = {op: node(graph, op).marks for op in ("Sin", "Cos", "Exp", "Tan")}
    assert {op: m[STREAM] for op, m in marks.items()} == {"Sin": "1", "Cos": "2", "Exp": "2", "Tan": "1"}
    assert {op: m.get("_super_kernel_scope") for op, m in marks.items()} == {
        "Sin": "k1",
        "Cos": "k2",
        "Exp": None,
        "Tan": "k1",
    }
    assert marks["Sin"]["_super_kernel_options"] == "feed-sync-all=1" and "_super_kernel_options" not in marks["Exp"]


def test_a_view_stands_in_its_scope():
    def f(x, y):
        with scope.npu_stream_switch("1"):
            a = x.t()
        return a @ y

    graph = graph_of(f, X, Y)
    assert node(graph, "Transpose").marks == STREAM_1 and node(graph, "MatMul").marks == {}


def test_passes_hand_the_marks_on():
    def f(x, y):
        with scope.npu_stream_switch("1"):
            return x @ y.t()

    compiled(f)(X, Y)
    graph = graph_of(f, X, Y)
    from airgraph.journal import Journal
    from airgraph.passes import run_passes

    run_passes(graph, Journal(), check=True)
    assert graph.of("Transpose") == [] and [n.marks for n in graph.nodes if "MatMul" in n.op] == [STREAM_1]


@pytest.mark.parametrize("kind", ["py", "txt", "pbtxt"])
def test_dumps(kind, tmp_path):
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type, config.debug.graph_dump.path = kind, str(tmp_path)
    torch.compile(branches, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)(X, Y)
    text = next(tmp_path.glob("dynamo_optimized*")).read_text()
    if kind == "py":
        assert (
            'marks={"_user_stream_label": "2", "_user_stream_priority": "3", "_enable_inner_parallel": "True", '
            '"_op_exec_never_timeout": True}' in text
        )
        assert "compat/scopes.py" not in text  # the user's line, not ours
        graph = from_py(text)
        assert node(graph, "Relu").marks == STREAM_1 and same_graph(graph, from_py(to_py(graph)))
    else:
        assert re.search(r'key: "_user_stream_label"\s+value \{\s+s: "1"\s+\}', text)
        assert re.search(r'key: "_op_exec_never_timeout"\s+value \{\s+b: true\s+\}', text)
        assert re.search(r'key: "_op_aicore_num"\s+value \{\s+s: "4"\s+\}', text)


# -- order ----------------------------------------------------------------------------------------------------------
def waits(graph, op):
    return [n.op for n in node(graph, op).control]


def test_npu_wait_tensor():
    def f(x, y):
        a = x.sin()
        with scope.npu_stream_switch("1"):
            return a, scope.npu_wait_tensor(y, a) * 2

    graph = graph_of(f, X, Y)
    assert waits(graph, "Identity") == ["Sin"] and node(graph, "Identity").marks == STREAM_1
    assert "Identity_0 = ge.Identity(" in to_py(graph) and "dependencies=[Sin_0]" in to_py(graph)
    for mode in MODES:
        torch._dynamo.reset()
        assert torch.equal(compiled(f, mode)(X, Y)[1], Y * 2)
        said = "npu_wait_tensor works here; TorchAir refuses it in mode reduce-overhead, and asks for tagged events"
        assert (said in JOURNALS[-1].remarks) is (mode == "reduce-overhead")


def test_npu_wait_tensor_whose_result_nobody_reads():
    def f(x, y):
        a = x.sin()
        with scope.npu_stream_switch("1"):
            scope.npu_wait_tensor(y, a)
            return a, y.exp()

    graph = graph_of(f, X, Y)
    assert graph.of("Identity") == [] and waits(graph, "Exp") == ["Sin"]


def test_the_result_of_npu_wait_tensor_is_a_tensor_of_its_own():
    def f(x, y):
        z = scope.npu_wait_tensor(x, y)
        z = z.add(1)
        return z, x

    for mode in MODES:
        x = X.clone()
        z, same = compiled(f, mode)(x, Y)
        assert torch.equal(z, X + 1) and torch.equal(same, X) and torch.equal(x, X)


def printing(x, y):
    ops.npu_print("first", x)
    with scope.npu_stream_switch("1"):
        ops.npu_print("second", y)
        z = scope.npu_wait_tensor(y, x) + 1
    ops.npu_print("third", z)
    return z


@pytest.mark.parametrize("mode", MODES)
def test_side_effects_keep_their_order(mode, capsys):
    run = compiled(printing, mode)
    for _ in range(3):
        run(torch.ones(1), torch.zeros(1))
        assert capsys.readouterr().out == "first [1]\nsecond [0]\nthird [1]\n"


@pytest.mark.parametrize("mode", MODES)
def test_writes_keep_their_order(mode):
    def f(cache, x):
        before = cache * 1
        with scope.npu_stream_switch("1"):
            cache.add_(x)
        after = scope.npu_wait_tensor(cache, x) * 2
        cache.mul_(3)
        return before, after

    run = compiled(f, mode)
    ours, theirs = torch.ones(3), torch.ones(3)
    for _ in range(3):
        x = torch.randn(3)
        for got, wanted in zip(run(ours, x), f(theirs, x)):
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(ours, theirs)


def test_waiting_costs_no_kernel():
    """On a CPU the order of the list is the order of work: a node that waits is computed like any other."""

    def f(x, y):
        a = x.sin()
        ops.wait([a])
        return a, torch.relu(y) * 2

    compiled(f)(X, Y)
    assert not any("by PyTorch" in remark or "by Python" in remark for remark in JOURNALS[-1].remarks)


# -- what has no effect ---------------------------------------------------------------------------------------------
REMARKS = {
    scope.npu_stream_switch: (
        ("s", 2),
        [
            "scope.npu_stream_switch('s'): its ops run in the order of the program, as there are no streams here",
            "scope.npu_stream_switch('s'): stream_priority=2 has no effect",
        ],
    ),
    scope.limit_core_num: ((4, 8), ["scope.limit_core_num(4, 8) has no effect: cores cannot be limited here"]),
    scope.super_kernel: (("k", "o=1"), ["scope.super_kernel('k', 'o=1') has no effect: passes decide what is fused"]),
    scope.op_never_timeout: (
        (False,),
        ["scope.op_never_timeout(False) has no effect: no op is ever stopped for taking long"],
    ),
    scope.data_dump: ((), ["scope.data_dump(): with data_dump on, only tensors of its ops are written"]),
    npugraph_ex.scope.deterministic: (
        (1,),
        [
            "scope.deterministic(1) has no effect: torch.use_deterministic_algorithms(True) "
            "is what PyTorch's kernels go by"
        ],
    ),
}


@pytest.mark.parametrize("make", REMARKS, ids=lambda make: make.__name__)
def test_the_journal_says_what_has_no_effect(make):
    arguments, said = REMARKS[make]

    def f(x):
        with make(*arguments):
            y = x + 1
            return y * 2

    torch._dynamo.reset()
    assert torch.equal(compiled(f, "reduce-overhead")(X), f(X))
    assert [r for r in JOURNALS[-1].remarks if r.startswith("scope.")] == said


def test_data_dump_of_a_scope(tmp_path):
    def f(x):
        y = x.sin()
        with scope.data_dump():
            z = y.cos()
        return z.exp()

    for wanted, files in ((None, {"cos"}), (lambda node: node if "exp" in node.name else None, set())):
        torch._dynamo.reset()
        folder = tmp_path / str(len(files))
        folder.mkdir()
        config = torchair.CompilerConfig()
        config.debug.data_dump.type, config.debug.data_dump.path = "npy", str(folder)
        if wanted:
            config.debug.data_dump.filter = wanted
        run = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config))
        assert torch.equal(run(X), f(X))
        assert {file.name.partition("-")[0] for file in folder.rglob("*.npy")} == files


# -- wrong use ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: scope.npu_stream_switch(1),
            TypeError,
            "npu_stream_switch() argument 'stream_tag' must be str, but got int.",
        ),
        (
            lambda: scope.npu_stream_switch("1", "0"),
            TypeError,
            "npu_stream_switch() argument 'stream_priority' must be int, but got str.",
        ),
        (
            lambda: scope.npu_stream_switch("1", 0, 1),
            TypeError,
            "npu_stream_switch() argument 'enable_inner_parallel' must be bool, but got int.",
        ),
        (
            lambda: scope.op_never_timeout("yes"),
            TypeError,
            "op_never_timeout() argument 'enable' must be bool, but got str.",
        ),
        (lambda: scope.super_kernel(3), TypeError, "super_kernel() argument 'scope' must be str, but got int."),
        (
            lambda: scope.npu_wait_tensor(X, 1),
            TypeError,
            "npu_wait_tensor() argument 'dependency' must be Tensor, but got int.",
        ),
        (lambda: scope.limit_core_num(0, 1), ValueError, "op_aicore_num of limit_core_num must be at least 1, got 0"),
        (
            lambda: npugraph_ex.scope.deterministic("1"),
            TypeError,
            "deterministic() argument 'level' must be int, but got str.",
        ),
    ],
)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


def test_a_graph_break_inside_a_scope():
    def f(x):
        with scope.npu_stream_switch("1"):
            y = x + 1
            torch._dynamo.graph_break()
            return y + 1

    run = torch.compile(f, backend=torchair.get_npu_backend())
    with pytest.raises(RuntimeError) as caught:
        run(X)
    text = str(caught.value)
    assert (
        "After you call the torch.ops.air.scope_enter operator, there is no paired call to the torch.ops.air.scope_exit "
        "operator. The parameters for these torch.ops.air.scope_enter calls are:" in text
    )
    assert "Please check your code or your post_grad_custom_pre_pass post_grad_custom_post_pass!" in text
    assert "no graph break inside a `with` of a scope" in text


# -- a pass of the user's ----------------------------------------------------------------------------------------------
def on_a_stream(namespace, target, end, wait_before):
    """A pass that puts a run of nodes on a stream, and lets another node wait for them."""
    air = getattr(torch.ops, namespace)

    def change(gm, inputs, config):
        graph = gm.graph
        for n in list(graph.nodes):
            if n.target is target:
                with graph.inserting_before(n):
                    graph.call_function(air.scope_enter.default, ([STREAM], ["stream_1"]))
            if n.target is end:
                with graph.inserting_after(n):
                    moment = graph.call_function(air.record.default, ())
                with graph.inserting_after(moment):
                    graph.call_function(air.scope_exit.default, ())
            if n.target is wait_before:
                with graph.inserting_before(n):
                    graph.call_function(air.wait.default, ([moment],))

    return change


def for_a_pass(x, y):
    z = torch.abs(x @ y)
    return torch.add(x, 1), torch.sub(x, y), z


aten = torch.ops.aten


@pytest.mark.parametrize("hook", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("namespace", ["air", "npugraph_ex"])
def test_a_pass_may_use_the_ops(namespace, hook):
    change = on_a_stream(namespace, aten.mm.default, aten.abs.default, aten.sub.Tensor)
    for mode in MODES:
        torch._dynamo.reset()
        for got, wanted in zip(compiled(for_a_pass, mode, **{hook: change})(X, Y), for_a_pass(X, Y)):
            torch.testing.assert_close(got, wanted)
        said = (
            "scope.npu_stream_switch('stream_1'): its ops run in the order of the program, as there are no streams here"
        )
        assert said in JOURNALS[-1].remarks


def test_what_such_a_pass_makes(tmp_path):
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = on_a_stream("air", aten.mm.default, aten.abs.default, aten.sub.Tensor)
    config.debug.graph_dump.type, config.debug.graph_dump.path = "py", str(tmp_path)
    torch.compile(for_a_pass, backend=torchair.get_npu_backend(compiler_config=config))(X, Y)
    graph = from_py(next(tmp_path.glob("dynamo_optimized*")).read_text())
    assert node(graph, "Abs").marks == node(graph, "MatMul").marks == {STREAM: "stream_1"}
    assert waits(graph, "Sub") == ["Abs"] and node(graph, "Add").control == ()


def test_an_exit_without_an_enter():
    def change(gm, inputs, config):
        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "call_function")):
            gm.graph.call_function(torch.ops.air.scope_exit.default, ())

    text = (
        "When you call the torch.ops.air.scope_exit operator: scope_exit_default, you must first call the "
        "torch.ops.air.scope_enter operator, as they must be called in pairs. Please check your code or your "
        "post_grad_custom_pre_pass post_grad_custom_post_pass!"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        compiled(lambda x: x + 1, post_grad_custom_pre_pass=change)(X)


def test_an_attribute_nobody_knows():
    def change(gm, inputs, config):
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        with gm.graph.inserting_before(calls[0]):
            gm.graph.call_function(torch.ops.air.scope_enter.default, (["_my_attribute"], ["7"]))
        with gm.graph.inserting_after(calls[-1]):
            gm.graph.call_function(torch.ops.air.scope_exit.default, ())

    assert torch.equal(compiled(lambda x: x + 1, post_grad_custom_pre_pass=change)(X), X + 1)
    assert "scope attribute _my_attribute='7' has no effect: it is in the dumps" in JOURNALS[-1].remarks


@pytest.mark.slow  # PyTorch's matcher takes its time to load
def test_a_users_pattern_does_not_join_two_streams():
    from airgraph.capture.patterns import remove_replacements

    def f(x, apart):
        y = torch.relu(x)
        if apart:
            with scope.npu_stream_switch("1"):
                return y + 1
        return y + 1

    torchair.register_replacement(lambda x: torch.relu(x) + 1, lambda x: torch.sin(x), [torch.empty(2)])
    try:
        run = compiled(f, "reduce-overhead")
        assert torch.equal(run(X, False), X.sin()) and torch.equal(run(X, True), X.relu() + 1)
    finally:
        remove_replacements()
