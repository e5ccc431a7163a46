"""The part of a graph that is kept with its plan."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import airgraph
from airgraph.compilation import PLAN_READERS
from airgraph.disk_cache import open_cache
from airgraph.engine import ENGINES
from airgraph.errors import VerifyError
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.ir.text import to_py
from airgraph.runtime.numbers import free_numbers, other_numbers
from airgraph.store.convention import FUNCTIONS
from airgraph.store.running_graph import COMPUTED, read_graph, running_graph, write_graph

sys.path.insert(0, str(Path(__file__).parent))
from recorded import registered


@pytest.fixture
def plan_of(monkeypatch, tmp_path):
    """The plan that is made for a function."""
    registered(monkeypatch, tmp_path)
    plans = []
    reader = lambda name, device, plan: plans.append(plan)  # noqa: E731
    PLAN_READERS.append(reader)

    def made(function, *args, dynamic=False):
        torch._dynamo.reset()
        torch.compile(function, backend=airgraph.backend(engine="recorded"), dynamic=dynamic)(*args)
        return plans[-1]

    yield made
    PLAN_READERS.remove(reader)
    del ENGINES["recorded"]


def sorted_softmax(x):
    y = (x.sin() * 2 + 1).sort(-1)[0]
    return (y.exp() - torch.tensor([1.0, 2.0, 4.0])).cos()


def again(graph):
    """Written and read."""
    writer = DataWriter(FUNCTIONS)
    data, arrays = write_graph(graph, writer)
    return read_graph(json.loads(json.dumps(data)), arrays, DataReader(writer.symbol_table(), FUNCTIONS))


def described(graph):
    return [
        (n.op, n.name, [v.tensor for v in n.values()], sorted(n.attrs), [(v.type, v.known) for v in n.outputs], n.note)
        for n in graph.nodes
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_nodes_inside_loops_are_left_out(plan_of, dynamic):
    plan = plan_of(sorted_softmax, torch.randn(5, 3), dynamic=dynamic)
    part = running_graph(plan, plan.boundary)
    assert {"Sin", "Exp", "Cos"} <= {n.op for n in plan.graph.nodes}
    assert {n.op for n in part.nodes} == {"Data", "Const", COMPUTED, "Sort", "NetOutput"} - (
        set() if part.of("Const") else {"Const"}
    )
    (sort,) = part.of("Sort")
    assert sort.inputs[0].node.op == COMPUTED and sort.inputs[0].type == plan.graph.node(sort.name).inputs[0].type
    assert part.notes[sort.note] == plan.graph.notes[plan.graph.node(sort.name).note]
    assert described(again(part)) == described(part)
    assert described(running_graph(plan_with(plan, part), plan.boundary)) == described(part)


def plan_with(plan, graph):
    from airgraph.plan.parse import parse_plan
    from airgraph.plan.text import plan_text

    return parse_plan(plan_text(plan, FUNCTIONS), graph, plan.boundary, plan.target, FUNCTIONS)


def test_what_reads_a_number_stays(plan_of):
    """Whether a number is captured, read from memory or left to calls is decided by all its readers."""

    def scaled(x, n):
        return x.sort(-1)[0] * n, x.roll(n, 0)

    class Executable:
        def __init__(self, graph):
            self.graph, self.cells = graph, set()

    plan = plan_of(scaled, torch.randn(5, 3), 2, dynamic=True)
    whole, part = Executable(plan.graph), Executable(again(running_graph(plan, plan.boundary)))
    assert free_numbers(plan.boundary, whole) == free_numbers(plan.boundary, part)
    names = [
        {i: [n.name for n in nodes] for i, nodes in other_numbers(plan.boundary, e).items()} for e in (whole, part)
    ]
    assert names[0] == names[1] and names[0]


GRAPH = {
    "name": "g",
    "types": [[0, "NPU", [2, 3]], [0, "NPU", [2]]],
    "notes": [],
    "nodes": [
        ["Data", "x", [], {"index": 0}, [0], -1],
        ["Const", "c", [], {"value": {"bytes": [0, 8]}, "literal": False}, [1], -1],
        ["Relu", "r", [0], {}, [0], -1],
        ["NetOutput", "NetOutput", [[2]], {}, [], -1],
    ],
    "names": {"x": "input"},
}
ARRAYS = np.array([1, 2], np.float32).tobytes()


def test_a_graph_is_read():
    graph = read_graph(GRAPH, ARRAYS, DataReader({}, FUNCTIONS))
    assert (
        "Relu" in to_py(graph) and graph.node("c").attrs["value"].tolist() == [1, 2] and graph.names == {"x": "input"}
    )


@pytest.mark.parametrize(
    ("row", "new", "message"),
    [
        (2, ["Nothing", "r", [0], {}, [0], -1], "there is no op 'Nothing' in the table"),
        (2, ["Relu", "r", [2], {}, [0], -1], "IndexError"),
        (2, ["Relu", "r", [-1], {}, [0], -1], "-1 is no number of anything"),
        (2, ["Relu", "r", [True], {}, [0], -1], "True is no number of anything"),
        (2, ["Relu", "r", [0, 0], {}, [0], -1], "it has 2 inputs, which is not what Relu takes"),
        (2, ["Relu", "r", [[0]], {}, [0], -1], "a list of inputs, which is not what Relu takes"),
        (2, ["Relu", "x", [0], {}, [0], -1], "duplicated node name 'x'"),
        (2, ["Relu", "r", [0], {}, [7], -1], "IndexError"),
        (2, ["Relu", "r", [0], {"a": {"b": 1}}, [0], -1], "is not a value"),
        (2, ["Relu", "r", [0], {}, [0], -1, [{"tuple": ["text"]}], []], "stands where numbers are expected"),
        (2, ["Relu", "r", [0], {"output_names": ["y"]}, [0], -1, [], [9]], "IndexError"),
        (2, ["Data", "r", [0], {"output_names": ["y"]}, [0], -1], "Data has inputs and outputs of its own"),
        (2, ["ReduceSum", "r", [0, 1], {"keep_dims": "exit()"}, [0], -1], "'keep_dims' is 'exit\\(\\)', and no word"),
        (2, "Relu", "not described as it should be"),
        (1, ["Const", "c", [], {"value": {"bytes": [0, 4]}}, [1], -1], "4 bytes, which is not float\\[2\\]"),
        (1, ["Const", "c", [], {"value": [1.0]}, [1], -1], "another type than its output"),
        (1, ["Const", "c", [], {"value": ["a", "b"]}, [1], -1], "stands where numbers are expected"),
        (3, ["NetOutput", "NetOutput", [2], {}, [], -1], "one of a list of inputs is missing"),
    ],
)
def test_what_is_wrong_with_a_graph(row, new, message):
    rows = [*GRAPH["nodes"]]
    rows[row] = new
    with pytest.raises(VerifyError, match=message):
        read_graph({**GRAPH, "nodes": rows}, ARRAYS, DataReader({}, FUNCTIONS))


@pytest.mark.parametrize(
    "change", [{"types": [[0, "GPU", []]]}, {"types": [[0, "NPU", [-3]]]}, {"notes": [1]}, {"names": 1}]
)
def test_what_is_wrong_with_its_tables(change):
    with pytest.raises(VerifyError):
        read_graph({**GRAPH, **change}, ARRAYS, DataReader({}, FUNCTIONS))


def test_a_kept_program_has_the_part_only(plan_of):
    from airgraph.store.planned_program import PlannedProgram

    plan_of(sorted_softmax, torch.randn(5, 3))
    (entry,) = [e for e in open_cache().entries() if e.kind == "program"]
    data = entry.path.read_bytes()
    program, _ = PlannedProgram.from_bytes(data[data.index(b"airgraph plan") :])
    assert program.graph.of(COMPUTED) and not program.graph.of("Sin") and program.parsed().steps
