"""The three graphs of one small script, as TorchAir's documentation shows them: static, dynamic, static again.

The script (`scripts/torchair_script.py`) runs by `airgraph run` in a process of its own; what it logs and dumps is compared
line by line with `golden/`. Symbols are named by their order of appearance; paths, lines, times and process ids go.
"""

import re
from pathlib import Path

import forked
import pytest

HERE = Path(__file__).parent
SCRIPT = (HERE / "scripts" / "torchair_script.py").read_text()
VARIANTS = {
    "static": SCRIPT,
    "dynamic": SCRIPT.replace("dynamic=False", "dynamic=True"),
    "mark_static": SCRIPT.replace("dynamic=False", "dynamic=True").replace(
        "# torch._dynamo.mark", "torch._dynamo.mark"
    ),
}
CLASSES = {
    "static": "Static FX graph compiled to static",
    "dynamic": "Dynamic FX graph compiled to dynamic",
    "mark_static": "Dynamic FX graph compiled to static",
}


class Run:
    """One variant of the script, run once for all tests."""

    def __init__(self, variant, folder):
        script = folder / "test_compile.py"
        script.write_text(VARIANTS[variant])
        self.result = forked.run("-m", "airgraph", "run", script.name, cwd=folder)
        self.dumps = {
            stage: [f.read_text() for f in sorted(folder.glob(f"dynamo_{stage}_graph_*.py"))]
            for stage in ("original", "optimized")
        }
        self.names = sorted(f.name for f in folder.glob("dynamo_*"))

    def graphs(self):
        """The `compiler inputs` blocks of the log, one a compiled graph."""
        lines = normal_log(self.result.stdout).splitlines()
        starts = [i for i, line in enumerate(lines) if line.endswith("compiler inputs")]
        ends = [next(j for j in range(i, len(lines)) if lines[j].startswith("    return ")) for i in starts]
        return ["\n".join(lines[i : j + 1]) for i, j in zip(starts, ends)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {variant: Run(variant, tmp_path_factory.mktemp(variant)) for variant in VARIANTS}


def by_appearance(text):
    names = {}
    return re.sub(r"\bs\d+\b", lambda m: names.setdefault(m[0], f"S{len(names)}"), text)


def normal_log(text):
    head = r"TORCHAIR\(\d+,python\):\S+ \S+ \[\S+?:\d+\]\d+"
    return re.sub(head, "TORCHAIR(PID,python):DATE TIME [FILE:LINE]TID", text)


def normal_dump(text):
    return by_appearance(re.sub(r'# File "[^"]*", line \d+', '# File "PATH", line N', text)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
class TestSeeds:
    def test_runs_and_equals_eager(self, runs, variant):
        """The script itself compares with eager and ends with a backward pass."""
        assert runs[variant].result.returncode == 0, runs[variant].result.stderr[-3000:]

    def test_compiles_once(self, runs, variant):
        """Four calls, one forward graph and one backward graph."""
        assert len(runs[variant].graphs()) == 2

    def test_fx_graph_in_the_log(self, runs, variant):
        golden = (HERE / "golden" / f"{variant}.log").read_text().strip()
        assert by_appearance(golden) in [by_appearance(g) for g in runs[variant].graphs()]

    def test_original_dump(self, runs, variant):
        golden = (HERE / "golden" / f"{variant}.py.txt").read_text()
        assert normal_dump(runs[variant].dumps["original"][0]) == normal_dump(golden)

    def test_classification(self, runs, variant):
        lines = re.findall(
            r"\w+ FX graph compiled to \w+(?= Ascend GE graph, graph id: \d)", runs[variant].result.stderr
        )
        assert lines == [CLASSES[variant]] * 2

    def test_optimized_dump_shows_the_passes(self, runs, variant):
        text = runs[variant].dumps["optimized"][0]
        assert "ge.Const(1, dtype=0)" not in text
        assert "ge.Transpose" not in text
        assert "transpose_x2=True" in text
        assert text.count("ge.Cast(") == (0 if variant == "static" else 1)  # the number's cast to float stays

    def test_backward_is_dumped_too(self, runs, variant):
        for stage in ("original", "optimized"):
            assert len(runs[variant].dumps[stage]) == 2
            assert "tangents_1_0 = ge.Data(" in runs[variant].dumps[stage][1]

    def test_file_names(self, runs, variant):
        pattern = r"dynamo_(original|optimized)_graph_[12]_rank_0_pid_\d+_ts_\d{20}\.py"
        assert all(re.fullmatch(pattern, name) for name in runs[variant].names)

    def test_runtime_values_are_logged(self, runs, variant):
        text = normal_log(runs[variant].result.stdout)
        assert text.count("TID runtime inputs") == 5  # four forward calls, one backward
        assert re.search(
            r"TID   output 0: <class 'torch.Tensor'>\(torch.Size\(\[100, 64\]\), torch.float32, contiguous=True", text
        )
        assert text.count("torchair run at ") == 5
