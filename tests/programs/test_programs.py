"""Forty programs of the second generator, compiled and eager; `make night` runs 5,000 for each engine."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import networks
import run
import torch
from case import Different, compare, evaluated

import airgraph


def one_set(seed):
    """The program at its first sizes, which are fixed: a tenth of the time."""
    case = networks.case(seed)
    case.arguments, case.dynamic = case.arguments[:1], False
    return case


@pytest.mark.slow
def test_random_networks_are_eager(monkeypatch, capsys):
    monkeypatch.setitem(run.GENERATORS, "networks", one_set)
    counts = run.run_programs("networks", range(71200, 71238), "native", 19)
    assert counts["failed"] == 0, capsys.readouterr().out
    assert counts["passed"] > 30, counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [21628, 52000, 702030, 702360],
    ids=["strides of isin", "a size that only an expression tells", "strides after a write", "a view after a write"],
)
def test_networks_that_were_not_eager_once(seed, capsys):
    assert run.run_programs("networks", [seed], "native", 1) == {"passed": 1}, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [72001, 72002])
def test_random_networks_through_dynamo_at_all_sizes(seed):
    case = networks.case(seed)
    expected = run.expectations(case)
    assert expected is not None
    compiled = torch.compile(case.run, backend=airgraph.backend(), dynamic=True)
    for index, wanted in enumerate(expected):
        compare(case, evaluated(case, compiled, case.fresh(index)), wanted)


def test_a_wrong_result_is_reported_with_the_command_that_repeats_it(monkeypatch, capsys):
    right = run.Compiled.__init__

    def wrong(self, function, *args):
        right(self, lambda *a: [o + 1 if o.is_floating_point() else o for o in function(*a)], *args)

    monkeypatch.setattr(run.Compiled, "__init__", wrong)
    assert run.run_programs("views", [7], "reference", 1) == {"failed": 1}
    assert "python tests/programs/run.py --generator views --engine reference --seeds 7" in capsys.readouterr().out


def test_programs_are_the_same_for_the_same_seed():
    first, again = networks.case(11), networks.case(11)
    assert first.text == again.text
    with pytest.raises(Different):
        compare(first, *(evaluated(c, c.run, c.fresh(i)) for i, c in enumerate((first, again))))


@pytest.mark.parametrize("deadly", [{5}, {3, 4}, {0, 9}], ids=str)
def test_no_program_is_lost_where_a_process_dies(monkeypatch, capsys, deadly):
    """Batches of four; a process dies at any batch with a deadly program in it."""

    def child(self, seeds, batch):
        done = []
        for i in range(0, len(seeds), batch):
            part = seeds[i : i + batch]
            if deadly & {*part}:
                return part, done, -11
            done += part
            self.count({"passed": len(part)})
        return [], done, 0

    monkeypatch.setattr(run.Children, "child", child)
    options = argparse.Namespace(
        generator="views", engine="native", seed=0, count=11, batch=4, workers=2, seconds=60, progress=False
    )
    assert run.Children(options).run() == {"passed": 11 - len(deadly), "failed": len(deadly)}
    reported = [json.loads(line)["again"].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(reported) == sorted(map(str, deadly))
