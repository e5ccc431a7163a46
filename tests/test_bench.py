"""The benchmark's models and its report, without timing anything and without the `bench` extra."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import cpu
import cpu_contender
import cpu_report
from cpu_models import MODELS


def row(ms, cold=1.0, status="ok"):
    figures = {"call_ms": ms, "q1_ms": 0.9 * ms, "q3_ms": 1.1 * ms, "cold_s": cold, "held_mb": 5.0, "calls_mb": 1.0}
    return {"status": status, **figures}


def made_up():
    """Two models: one where we win, one where the only faster peer was wrong and another one failed."""
    fast = {
        "eager": row(8.0),
        "aot_eager": row(1.0, 2.0),
        "inductor": row(4.0, 10.0),
        "onnxruntime": row(2.0),
        "airgraph": row(2.0, 3.0),
        "airgraph_aot": row(1.0, 2.5),
    }
    slow = {
        "eager": row(4.0),
        "inductor": row(3.0, 10.0),
        "onnxruntime": row(0.1, status="wrong"),
        "openvino": {"status": "failed", "error": "RuntimeError: no such op"},
        "airgraph": row(6.0, 5.0),
    }
    step = {"eager": row(9.0), "inductor": row(8.0), "airgraph": row(4.0)}
    return {
        name: {"size": "", "train": name == "step", "complete": True, "contenders": rows}
        for name, rows in (("fast", fast), ("slow", slow), ("step", step))
    }


PLAIN = ("mlp", "llama_decode", "resnet", "lstm", "dlrm", "norms", "pointwise")  # the others are made by transformers


LITTLE = [n for n, model in MODELS.items() if model.group in ("small", "odd")]


@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.slow) for n in LITTLE])
def test_model_runs(name):
    if name not in PLAIN:
        pytest.importorskip("transformers")
    model = MODELS[name]
    module, args = model.build()
    if model.train:
        step = cpu_contender.training(module, module, args)
        loss, *gradients = step.outputs(step.call())
        assert loss.ndim == 0 and len(gradients) > 10
        return
    with torch.no_grad():
        first, again = module(*args), module(*args)
    assert first.isfinite().all() and first.std() > 0
    assert torch.equal(first, again), "a second call on the same inputs must give the same result"


@pytest.mark.parametrize(
    "name", ["resnet50", "mobilenet_v3x16", "convnext_tiny", "unet_blockx16", "gru", "lstm_module"]
)
def test_plain_modules_of_real_size(name):
    """Sizes only: running them takes seconds."""
    with torch.device("meta"), torch.no_grad():
        module, args = MODELS[name].make()
        assert module.eval()(*args).ndim >= 2


def test_groups_are_names_of_models():
    options = cpu.parser().parse_args(["--models", "odd,mlp", "--threads", "1,2"])
    assert options.models == ["electra", "qwen3_heads_40", "deit_heads_60", "mlp"]
    assert options.threads == [1, 2]


def test_runs_on_other_processors_stay(tmp_path):
    options = cpu.parser().parse_args(["--models", "mlp", "--out", str(tmp_path / "cpu.json")])
    options.batch_ms = options.rounds = 1
    (tmp_path / "cpu.json").write_text('{"another processor, 2 threads": {"models": {}}}')
    record = {"size": "", "train": False, "complete": True, "contenders": {"eager": row(1.0)}}
    for threads in (1, 2):
        cpu.Bench(options, threads, {"mlp": record}).save()
    kept = cpu.stored(tmp_path / "cpu.json")
    assert list(kept) == ["another processor, 2 threads", cpu.run_name(1), cpu.run_name(2)]
    assert kept[cpu.run_name(2)]["models"]["mlp"]["contenders"]["eager"]["call_ms"] == 1.0


def test_state_goes_in_and_comes_out():
    model = MODELS["llama_decode"]
    module, args = model.build()
    stateless, given = model.exportable(module, args)
    given = [value.clone() for value in given]
    with torch.no_grad():
        result, *state = stateless(*given)
        torch.testing.assert_close(result, module(*args))
    torch.testing.assert_close(state[0], module.keys_0)


def test_wrong_outputs_are_told():
    wanted = [torch.ones(3), torch.full((2,), 1e-9)]
    assert not cpu_contender.difference([torch.ones(3) + 1e-6, torch.zeros(2)], wanted)["wrong"]
    assert cpu_contender.difference([torch.ones(3) + 1e-2, torch.zeros(2)], wanted)["wrong"]
    assert cpu_contender.difference([torch.full((3,), float("nan")), torch.zeros(2)], wanted)["wrong"]
    assert cpu_contender.difference([torch.ones(4), torch.zeros(2)], wanted)["wrong"]


def test_only_right_results_are_ranked():
    results = made_up()
    assert cpu_report.best_peer(results["fast"]) == ("onnxruntime", 2.0)
    assert cpu_report.best_peer(results["slow"]) == ("inductor", 3.0)
    assert cpu_report.speedup(results["slow"], "airgraph") == 0.5
    assert cpu_report.speedup(results["slow"], "airgraph_aot") is None


def test_summary():
    told = cpu_report.summary(made_up())
    assert told["airgraph"]["best_peer_over_ours"] == pytest.approx((1.0 * 0.5) ** 0.5)
    assert told["airgraph"]["worst_model"] == "slow"
    assert told["airgraph"]["training_inductor_over_ours"] == pytest.approx(2.0)
    assert told["airgraph"]["compile_beyond_aot_eager_s"] == pytest.approx(1.0)
    assert told["airgraph_aot"]["models"] == 1
    assert told["airgraph_aot"]["compile_over_inductor"] == pytest.approx(0.25)


def test_table():
    text = cpu_report.table(made_up())
    assert "slow, openvino: failed: RuntimeError: no such op" in text
    assert "wrong 0.1" in text
    assert "*2 ±10" in text
    assert cpu_report.table({})


def test_markdown():
    lines = cpu_report.markdown(
        made_up() | {"short": {**made_up()["fast"], "contenders": {"eager": row(0.2), "airgraph": row(0.4)}}}
    )
    head, _, first, *_, last = lines.splitlines()
    assert (
        head
        == "| | eager | Inductor | ONNX Runtime | `airgraph.compile` | `torch.compile` | best / compile | best / torch.compile |"
    )
    assert first == "| fast | 8 | 4 | *2 | 1 | 2 | 2.00 | 1.00 |"
    assert last == "| **geometric mean** | | | | | | **2.00** | **0.71** |"  # without the short one


@pytest.mark.slow
def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    cpu_report.plot(made_up(), str(tmp_path / "plot.png"), "a processor")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_errors_do_not_name_folders():
    error = RuntimeError("cannot open /home/someone/model.onnx\nsecond line")
    assert cpu_contender.first_line(error) == "RuntimeError: cannot open model.onnx"


def test_only_missing_keeps_whole_models(tmp_path):
    options = cpu.parser().parse_args(["--models", "mlp,vit,dlrm", "--contenders", "inductor", "--only-missing"])
    whole = {"complete": True, "contenders": {"eager": row(1.0), "inductor": {"status": "failed", "error": "no"}}}
    absent = {"complete": True, "contenders": {"eager": row(1.0), "inductor": {"status": "unavailable", "error": "no"}}}
    assert cpu.Bench(options, 2, {"mlp": whole, "vit": absent}).wanted == ["vit", "dlrm"]


def test_spread_of_batches():
    assert cpu.spread([3.0, 1.0, 2.0]) == {"call_ms": 2.0, "q1_ms": 1.5, "q3_ms": 2.5, "batches": 3}
    assert cpu.spread([])["call_ms"] is None
