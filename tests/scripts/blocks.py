"""Runs code blocks of documents as they stand, in this one process, and saves what they computed: `airgraph run blocks.py FILE`.

What a fragment needs around it is given here; the text of the blocks (`seeds/`) is never touched, but for the two changes
that the document itself asks for: dynamic=True, and an input that is marked static.
"""

import contextlib
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch_npu
import torchair
from torch import nn

BLOCKS = Path(__file__).parent / "seeds"
GOLDEN = Path(__file__).parents[1] / "golden"


def text_of(name):
    return (BLOCKS / name).read_text()


def run(name, text=None, **around):
    """The names a block leaves behind; those of `around` are there when it begins."""
    space = {"__name__": "__main__", "torch": torch, **around}
    exec(compile(text or text_of(name), str(BLOCKS / name), "exec"), space)
    return space


def quietly(name, **around):
    """The names a block leaves behind, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        space = run(name, **around)
    return space, out.getvalue()


# -- torch.compile of torch_npu -------------------------------------------------------------------------------------
def training(name):
    """The loss of every step and the weights at the end."""
    losses, forward = [], nn.CrossEntropyLoss.forward

    def watched(self, *args):
        losses.append(forward(self, *args))
        return losses[-1]

    torch.manual_seed(0)
    nn.CrossEntropyLoss.forward = watched
    try:
        space = run(name)
    finally:
        nn.CrossEntropyLoss.forward = forward
    devices = {str(p.device) for p in space["model"].parameters()} | {str(losses[-1].device)}
    assert devices == {"npu:0"}
    return {"losses": torch.stack(losses).detach().cpu(), "state": space["model"].cpu().state_dict()}


# -- static and dynamic graphs --------------------------------------------------------------------------------------
STATIC = text_of("static_and_dynamic.py")
DYNAMIC = STATIC.replace("dynamic=False", "dynamic=True")
VARIANTS = {
    "static": STATIC,
    "dynamic": DYNAMIC,
    "mark_static": DYNAMIC.replace("inp = torch.randn(100, 128).npu()\n", text_of("mark_static.py")),
}


def graphs(variant):
    """Another result of the compiled model with what it was computed from, and the graph as it was dumped."""
    folder = Path(variant)
    folder.mkdir()
    with moved_to(folder):
        space = run("static_and_dynamic.py", VARIANTS[variant])
    result = space["demo_model"](space["inp"], space["scale_factor"])
    dump = min(folder.glob("dynamo_original_graph_*.py"), key=lambda file: int(file.name.split("_")[3]))
    return {
        "result": result.detach().cpu(),
        "input": space["inp"].cpu(),
        "number": space["scale_factor"],
        "state": space["demo_model"]._orig_mod.cpu().state_dict(),
        "dump": dump.read_text(),
    }


@contextlib.contextmanager
def moved_to(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def dumped_graph(variant):
    """A dump of the document is Python: run, it is a graph again, and that is run with numbers."""
    from torchair.ge._ge_graph import GeGraph, default_ge_graph

    from airgraph.engine.reference import ReferenceExecutable

    made = GeGraph()
    with default_ge_graph(made):
        run(f"{variant}.py.txt", (GOLDEN / f"{variant}.py.txt").read_text())
    torch.manual_seed(1)
    inputs = {}
    for node in made.graph.inputs:
        shape = [size if isinstance(size, int) and size >= 0 else 100 for size in node.output.type.shape]
        inputs[node.name] = torch.randn(shape) if shape else torch.tensor(100)
    (result,), _ = ReferenceExecutable(made.graph, torch.device("cpu")).run(inputs, {})
    return {
        "result": result,
        "inputs": [value for value in inputs.values() if value.dim()],
        "ops": [n.op for n in made.op],
    }


# -- inside TorchAir ------------------------------------------------------------------------------------------------
def gm_runner():
    """The block's runner around a graph of ours: both log what goes in and out."""
    from airgraph.runtime.program import summary

    logger = torchair.core.utils.logger
    space = run(
        "gm_runner.py",
        Callable=Callable,
        logger=logger,
        logging=logging,
        _summary=summary,
        record_function=torch.profiler.record_function,
    )
    x = torch.randn(2, 3).npu()
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: [torch.relu(x) + 1])(x)
    runner = space["_GmRunner"](torchair.get_compiler()(gm, [x]))
    seen, handler = [], logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    (y,) = runner(x)
    logger.setLevel(level)
    logger.removeHandler(handler)
    return {"input": x.cpu(), "result": y.cpu(), "log": [line for line in seen if "run at" not in line]}


def converter():
    """The block's decorator beside ours: what it makes of a function, of None, and what ours does with the same function."""

    def wrap(function):
        return lambda *args, **named: function(*args, **named)

    space = run(
        "converter.py", inspect=inspect, Any=object, empty_function=lambda f: f, _wrap_converter=wrap, _CONVERTERS={}
    )
    torch.library.define("seeds::twice", "(Tensor x) -> Tensor")
    torch.library.impl("seeds::twice", "CompositeExplicitAutograd")(lambda x: x * 2)
    op = torch.ops.seeds.twice.default
    found = []
    for register in (space["register_fx_node_ge_converter"], torchair.register_fx_node_ge_converter):

        @register(op)
        def convert(x, *, meta_outputs=None):
            return torchair.ge.custom_op("Mul", x, torchair.ge.Const(3, dtype=x.dtype))

        found.append((type(convert).__name__, convert._aten_op is op, register(None)(1)))
    kept = op._ge_converter
    x = torch.ones(2).npu()
    return {
        "found": found,
        "needs meta": kept.require_meta,
        "result": torch.compile(lambda x: torch.ops.seeds.twice(x), backend="npu")(x).cpu(),
    }


# -- dynamic and static graphs, in general ---------------------------------------------------------------------------
def large_model():
    """The fragment is for CUDA, and moves to the npu as such scripts do."""
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    from airgraph.compat.npu import transfer

    torch.manual_seed(0)

    class MyLargeModel(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    batches = [torch.randn(3, 8) for _ in range(2)]
    space = run("large_model.py", MyLargeModel=MyLargeModel, input_data=batches[0].npu(), input_data2=batches[1].npu())
    transfer.uninstall()
    results = [space["output"], space["output2"]]
    assert {str(y.device) for y in results} == {"npu:0"}
    return {
        "batches": batches,
        "results": [y.detach().cpu() for y in results],
        "state": space["model"].cpu().state_dict(),
    }


def torchscript():
    space = run("torchscript.py")
    traced, given = space["traced_model"], (torch.tensor([3.0]), torch.tensor([4.0]))
    return {"on cpu": traced(*given), "on npu": traced(*(t.npu() for t in given)).cpu()}


def main(target):
    found = {
        "decorator": quietly("decorator.py")[1],
        "eager_graph": quietly("eager_graph.py")[1],
        "torchscript": torchscript(),
        "large_model": large_model(),
        "gm_runner": gm_runner(),
        "converter": converter(),
        "inductor": training("inductor.py"),
        "npugraphs": training("npugraphs.py"),
        **{f"dump of {variant}": dumped_graph(variant) for variant in VARIANTS},
        **{variant: graphs(variant) for variant in VARIANTS},  # last: it turns every log of PyTorch on
    }
    torch.save(found, target)


if __name__ == "__main__":
    assert torch_npu.npu.is_available()
    main(sys.argv[1])
