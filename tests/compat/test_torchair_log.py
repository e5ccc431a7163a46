"""The log lines that TorchAir's documentation tells people to look for, in its words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import npugraph_ex
import pytest
import torch
import torchair
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    yield
    for logger in (torchair.logger, npugraph_ex.logger):
        logger.setLevel(logging.ERROR)


def npu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="npu")


def logged(capfd: pytest.CaptureFixture[str], work: Callable[[], Any], level: int = logging.DEBUG) -> list[str]:
    """The messages of both logs, without what stands before them."""
    capfd.readouterr()
    for logger in (torchair.logger, npugraph_ex.logger):
        logger.setLevel(level)
    work()
    out, err = capfd.readouterr()
    return re.sub(r"^\[\w+\] \w+\(\d+,python\):[\d-]+[ -][\d:.]+ \[[\w.]+:\d+\]\d+ ", "", out + err, flags=re.M).split(
        "\n"
    )


def ge(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    for name, value in options.items():
        setattr(config.experimental_config, name, value)
    return torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)


def replayed(f: Callable[..., Any], dynamic: bool = True, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="npugraph_ex", options=options, dynamic=dynamic)


def called(run: Callable[..., Any], *calls: Any) -> None:
    """One call after the other; no result is held."""
    for args in calls:
        run(*args)


def graph_name(lines: list[str]) -> str:
    return next(m[1] for line in lines if (m := re.search(r"fx_graph (graph_\d+)", line)))


# -- captures -----------------------------------------------------------------------------------------------------------
def test_captured_and_found(capfd: pytest.CaptureFixture[str]) -> None:
    run = replayed(lambda x: x * 2)
    calls = [2, 2, 2, 3, 3]
    lines = logged(capfd, lambda: called(run, *([npu(n, 4)] for n in calls)))
    name = graph_name(lines)
    said = [re.sub(r"id: \d+", "id: N", line) for line in lines if "AclGraph" in line]
    new = "No find captured AclGraph of fx_graph {} with graph key {{[{}, 4]}}, and start to capture it."
    done = "Success to capture fx_graph {} for graph key{{[{}, 4]}}. Start to run AclGraph{{id: N}} with the updated node num {{0}}."
    found = "Find captured AclGraph{{id: N}} of fx_graph {} with graph key {{[2, 4]}}."
    kept = "The current AclGraph no needs to be recaptured for fx_graph {} with graph key {{[2, 4]}}."
    assert said == [
        *(text.format(name, 2) for text in (new, done)),
        *(text.format(name) for text in (found, kept)),
        *(text.format(name, 3) for text in (new, done)),
    ]
    assert counters["npugraph_ex"][f"captured_{name}"] == 2


def test_nothing_is_said_of_captures_at_level_error(capfd: pytest.CaptureFixture[str]) -> None:
    run = replayed(lambda x: x * 2)
    assert logged(capfd, lambda: called(run, *[[npu(2, 4)]] * 4), logging.ERROR) == [""]


@pytest.mark.parametrize(
    ("options", "cause", "times"), [({"force_recapture": True}, "force_recapture", 2), ({}, "mutated_input_change", 1)]
)
def test_captured_again(capfd: pytest.CaptureFixture[str], options: Any, cause: str, times: int) -> None:
    run = replayed(lambda x, y: x.mul_(2) + y, dynamic=False, **options)
    x, other, y = npu(2), npu(2), npu(2)
    lines = logged(capfd, lambda: called(run, (x, y), (x, y), (x, y), (other, y)))
    name = graph_name(lines)
    again = f"The current AclGraph needs to be recaptured for fx_graph {name} with graph key {{no_updated_input}}."
    assert lines.count(again) == times == counters["npugraph_ex"][f"recapture_due_to_{cause}_{name}"]


def test_the_capture_limit(capfd: pytest.CaptureFixture[str]) -> None:
    run = replayed(lambda x: x * 2, capture_limit=1)
    lines = logged(capfd, lambda: called(run, *([npu(n, 4)] for n in (2, 2, 3, 3))))
    text = f"The static_capture_size_limit reached when capturing fx_graph {graph_name(lines)} with graph key [3, 4]: "
    assert text + "the least recently used recording is evicted (capture_limit is 1)" in lines


# -- passes -------------------------------------------------------------------------------------------------------------
def test_cats(capfd: pytest.CaptureFixture[str]) -> None:
    run = replayed(lambda x: (torch.cat([x + 1, x * 2, x.sin()]), torch.cat([x + 3, x.cos()], 1)), dynamic=False)
    lines = logged(capfd, lambda: run(npu(2, 4)))
    wanted = ["[remove_cat_ops] Found 2 cat node(s)", "Optimizing cat (3 inputs)"]
    skipped = "Skip cat_1: its parts are not all results of ops that can write there"
    assert [line for line in lines if line in (*wanted, skipped) or line.startswith("remove_cat_ops:")] == [
        *wanted,
        skipped,
        "remove_cat_ops: Optimized 1 cat node(s)",
    ]
    switched_off = replayed(lambda x: torch.cat([x + 1, x * 2]), dynamic=False, remove_cat_ops=False)
    assert not [line for line in logged(capfd, lambda: switched_off(npu(2, 4))) if "remove_cat_ops" in line]


def test_what_a_pass_changed(capfd: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(logged(capfd, lambda: ge(lambda x: x[:, :].view(4) + 1)(npu(2, 2))))
    told = text[text.index("After fx graph pass(optimize_noop_ops) optimization:\n") :].split("\n\n")[0].split("\n")
    assert re.fullmatch(r"    cost 0\.\d{10}s,", told[1])
    before, after = map(int, re.fullmatch(r"    before (\d) nodes, after (\d) nodes,", told[2]).groups())  # type: ignore[union-attr]
    removed = re.findall(r"'(\w+)'", told[3])
    assert told[3].startswith("    removed nodes: [") and len(removed) == before - after > 0
    assert told[4] == "    added nodes: [],"
    assert re.fullmatch(r"    name +cnt\(before\)  cnt\(after\)  diff", told[6])
    assert re.fullmatch(rf"    total +{before} +{after} +{after - before}", told[8])
    names = ["optimize_noop_ops", "optimize_sym_input", "view_to_reshape"]
    assert [n for n in re.findall(r"After fx graph pass\((\w+)\)", text) if n in names] == names


def test_each_node(capfd: pytest.CaptureFixture[str]) -> None:
    lines = logged(capfd, lambda: ge(lambda x: torch.split(x.t() * 3, 1)[0] + x.sum())(npu(2, 3)))
    data = "Pack(meta:FakeTensor(dtype=torch.float32, size=[2, 3] npu:Tensor(arg0_1:0, dtype=DT_FLOAT, size=[2, 3])))"
    start = lines.index("target: arg0_1")
    assert lines[start - 1 : start + 2] == ["-------------------", "target: arg0_1", f"output {data}"]
    start = lines.index("target: aten.sum.default")
    assert lines[start + 1] == f"input 0: {data}"
    start = lines.index("target: aten.mul.Tensor")
    assert lines[start + 2] == "input 1: 3"
    assert "npu:View(Tensor(arg0_1:0, dtype=DT_FLOAT, size=[2, 3])))" in lines[start + 1]
    assert re.fullmatch(r"output Pack\(.* npu:Tensor\(Mul:0, dtype=DT_FLOAT, size=\[3, 2\]\)\)\)", lines[start + 3])
    start = lines.index("target: aten.split.Tensor")
    assert lines[start + 3].startswith("output [Pack(meta:FakeTensor(dtype=torch.float32, size=[1, 2] npu:Tensor(Split")


# -- compiling and running ----------------------------------------------------------------------------------------------
def test_compiling(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TNG_LOG_LEVEL", "1")
    lines = logged(capfd, lambda: ge(lambda x: x + 1)(npu(2, 2)), logging.INFO)
    [name] = [line.split()[-1].rstrip(".") for line in lines if line.startswith("start compile graph: ")]
    assert f"end compile graph: {name} and start run graph." in lines
    number = int(name.removeprefix("graph_")) - 1
    assert f"Create npu graph executor for static graph {number}" in lines


def test_gears_have_an_executor_of_their_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNG_LOG_LEVEL", "1")
    torch._dynamo.reset()
    x = npu(2, 2)
    torchair.inference.set_dim_gears(x, {0: [2, 4]})
    run = torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(), dynamic=False)
    assert any(
        line.startswith("Create npu graph executor for muti gear graph ") for line in logged(capfd, lambda: run(x))
    )


def test_the_time_of_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    run = ge(lambda x: x + 1)
    run(npu(2, 2))
    lines = logged(capfd, lambda: run(npu(2, 2)), 35)
    assert re.fullmatch(r"torchair run at \d{16}, process input: \d+us, compile 0us, graph run: \d+us", lines[0])


def test_a_warning_that_is_not_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for name in ("a", "a", "b"):
            torchair.logger.warning_once("only once: %s", name)

    assert logged(capfd, work, logging.WARNING) == ["only once: a", "only once: b", ""]
    assert logged(capfd, lambda: torchair.logger.warning_once("never seen"), logging.ERROR) == [""]
    assert logged(capfd, lambda: torchair.logger.warning_once("never seen"), logging.WARNING) == ["never seen", ""]
