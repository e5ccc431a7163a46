"""torch_npu's packages beside its ops: profiler, testing, optim, limits of cores, attention over blocks."""

import csv
import json
import os
import unittest

import numpy as np
import pytest
import torch
import torch_npu
from torch_npu.testing.common_utils import check_operators_in_prof, create_common_tensor
from torch_npu.testing.testcase import TestCase


# -- profiler -------------------------------------------------------------------------------------------------------
def profiled(folder, **settings):
    profiler = torch_npu.profiler
    model, x = torch.nn.Linear(4, 4).npu(), torch.ones(2, 4).npu()
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        schedule=profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), **settings),
        record_shapes=True,
    ) as prof:
        for _ in range(5):
            model(x).relu()
            prof.step()
    return prof


def test_profile_writes_a_trace_and_a_table(tmp_path):
    profiled(tmp_path, worker_name="rank0")
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("rank0_") and folder.name.endswith("_ascend_pt")
    trace = json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    events = [e for e in trace["traceEvents"] if e.get("name") == "aten::relu"]
    assert len(events) == 2 and all(e["ph"] == "X" and e["dur"] >= 0 for e in events)
    rows = list(csv.DictReader((folder / "ASCEND_PROFILER_OUTPUT" / "operator_details.csv").open()))
    (relu,) = [row for row in rows if row["Name"] == "aten::relu"]
    assert relu["Count"] == "2" and relu["Input Shapes"] == "[[2, 4]]" and float(relu["Host Total Duration(us)"]) > 0
    info = json.loads((folder / "profiler_info.json").read_text())["config"]
    assert info["activities"] == ["ProfilerActivity.CPU", "ProfilerActivity.NPU"] and info["record_shapes"] is True
    torch_npu.profiler.profiler.analyse(str(tmp_path))


def test_trace_without_a_table(tmp_path):
    prof = profiled(tmp_path, analyse_flag=False)
    assert [path.name for path in tmp_path.glob("*/ASCEND_PROFILER_OUTPUT/*")] == ["trace_view.json"]
    assert check_operators_in_prof(["aten::relu"], prof) and not check_operators_in_prof(["aten::conv2d"], prof)
    with pytest.raises(RuntimeError, match=r"no trace of torch_npu\.profiler"):
        torch_npu.profiler.analyse(str(tmp_path / "nowhere"))


def test_settings_of_the_chip(tmp_path):
    profiler = torch_npu.profiler
    config = profiler._ExperimentalConfig(
        profiler_level=profiler.ProfilerLevel.Level1, export_type=profiler.ExportType.Text, l2_cache=False
    )
    with pytest.warns(UserWarning, match="AI Cores and caches are the chip's"):
        prof = profiler.profile(experimental_config=config, with_stack=True)
    prof.start()
    torch.ones(2).npu() + 1
    prof.stop()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::add" in (tmp_path / "trace.json").read_text()
    assert prof.npu_info["experimental_config"]["aic_metrics"] == "ACL_AICORE_PIPE_UTILIZATION"
    with pytest.raises(TypeError, match=r"profiler_level must be a torch_npu.profiler.ProfilerLevel, got str"):
        profiler._ExperimentalConfig(profiler_level="Level1")
    assert profiler.ProfilerLevel.Level2 in profiler.supported_profiler_level()
    assert profiler.AiCMetrics.Memory in profiler.supported_ai_core_metrics()
    assert profiler.supported_activities() == set(profiler.ProfilerActivity)


# -- profiles of a program that runs already -------------------------------------------------------------------------
@pytest.fixture
def dp(monkeypatch):
    """The module as a new process has it."""
    from torch_npu.profiler import dynamic_profile

    fresh = dynamic_profile.DynamicProfile()
    monkeypatch.setattr(dynamic_profile, "_process", fresh)
    yield dynamic_profile
    fresh.finish()
    for handler in list(fresh.log.handlers):
        fresh.log.removeHandler(handler)
        handler.close()


def ask(path, **settings):
    """Changes the file as a user would, with another time."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **settings}))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def counted(folder):
    """How often each trace below a folder has a ReLU."""
    traces = sorted(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
    return [sum(e.get("name") == "aten::relu" for e in json.loads(t.read_text())["traceEvents"]) for t in traces]


def run_steps(dp, count):
    x = torch.ones(2).npu()
    for _ in range(count):
        x.relu()
        dp.step()


def test_a_profile_is_asked_for_by_a_file(dp, tmp_path):
    dp.init(str(tmp_path / "config"))
    path, results = tmp_path / "config" / "profiler_config.json", tmp_path / "results"
    assert json.loads(path.read_text()) == dp.TEMPLATE
    run_steps(dp, 3)
    assert counted(results) == []
    ask(path, start_step=-1, active=2, warmup=1, analyse=True, prof_dir=str(results), metadata={"model": [1, 2]})
    run_steps(dp, 8)
    assert counted(results) == [2]
    (folder,) = results.iterdir()
    assert (folder / "ASCEND_PROFILER_OUTPUT" / "operator_details.csv").exists()
    assert '"model": [1, 2]' in (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text()
    ask(path, start_step=15, active=1, warmup=0, analyse=False)
    run_steps(dp, 3)
    assert counted(results) == [2]
    run_steps(dp, 3)
    assert sorted(counted(results)) == [1, 2]
    (log,) = (tmp_path / "config" / "log").iterdir()
    assert [line.rpartition(": ")[2] for line in log.read_text().splitlines()] == [
        "Create profiler_config.json default.",
        "Start Dynamic Profiler at 4 step.",
        "Stop Dynamic Profiler at 7 step.",
        "Start Dynamic Profiler at 15 step.",
        "Stop Dynamic Profiler at 16 step.",
    ]


def test_a_profile_from_here_on(dp, tmp_path):
    dp.init(str(tmp_path / "config"))
    own = tmp_path / "own.json"
    own.write_text(
        json.dumps({"prof_dir": str(tmp_path / "own"), "active": 2, "experimental_config": {"export_type": "db"}})
    )
    run_steps(dp, 2)
    dp.start(str(own))
    with pytest.warns(UserWarning, match="Profiler already started"):
        dp.start(str(own))
    run_steps(dp, 4)
    assert counted(tmp_path / "own") == [2]
    ask(tmp_path / "config" / "profiler_config.json", prof_dir=str(tmp_path / "init"))
    with pytest.warns(UserWarning, match="The provided config_path is invalid"):
        dp.start(str(tmp_path / "nowhere.json"))
    run_steps(dp, 2)
    assert counted(tmp_path / "init") == [1]


def test_wrong_settings_do_not_end_a_training(dp, tmp_path, monkeypatch):
    dp.init(str(tmp_path / "config"))
    path = tmp_path / "config" / "profiler_config.json"
    with pytest.warns(UserWarning, match="Init dynamic profiling repeatedly"):
        dp.init(str(tmp_path))
    for wrong in (
        {"activities": ["GPU"]},
        {"experimental_config": {"profiler_level": "Level9"}},
        {"rank_list": 3, "is_rank": True},
    ):
        ask(path, **{**dp.TEMPLATE, "start_step": -1, **wrong})
        with pytest.warns(UserWarning, match=r"profiler_config.json cannot be used"):
            run_steps(dp, 2)
    ask(path, **{**dp.TEMPLATE, "start_step": -1, "is_rank": True, "rank_list": [1], "prof_dir": str(tmp_path / "r")})
    monkeypatch.setenv("RANK", "0")
    run_steps(dp, 2)
    assert counted(tmp_path / "r") == []
    monkeypatch.setenv("RANK", "1")
    ask(path, active=0)
    run_steps(dp, 3)
    assert counted(tmp_path / "r") == [1]


# -- testing --------------------------------------------------------------------------------------------------------
class Cases(TestCase):
    def test_near(self):
        x, y = create_common_tensor([np.float32, 2, (4, 5)], -1, 1)
        self.assertRtolEqual(x, y.cpu())
        self.assertRtolEqual([x.numpy() * (1 + 1e-5)], [y])
        self.assertRtolEqual(x.half(), y, auto_trans_dtype=True, prec=1e-3)
        self.assertEqual(x, y)
        self.assertEqual(2, 2)

    def test_far(self):
        x = torch.arange(4.0)
        for other, said in (
            (x + 1, "result error: 4 of 4"),
            (x.double(), "dtype error"),
            (x[:2], "shape error"),
            (torch.full((4,), float("nan")), "result error"),
        ):
            with self.assertRaisesRegex(AssertionError, said):
                self.assertRtolEqual(x, other)
        with self.assertRaisesRegex(AssertionError, "result error: 1 of 2"):
            self.assertRtolEqual(torch.tensor([1, 2]), torch.tensor([1, 3]))
        with self.assertRaises(AssertionError):
            self.assertEqual(x, x + 1)


def test_testcase():
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Cases).run(result)
    assert result.testsRun == 2 and result.wasSuccessful(), result.failures + result.errors


# -- optimizers -----------------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adadelta": {},
    "RMSprop": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_are_pytorchs(name):
    results = []
    for package, prefix in ((torch.optim, ""), (torch_npu.optim, "NpuFused")):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).npu()
        optimizer = getattr(package, prefix + name)(model.parameters(), **OPTIMIZERS[name])
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3).npu()).square().sum().backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0])


def lamb(w, g, s, t):
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    change = s["m"] / (np.sqrt(s["v"]) + 1e-6) + 0.01 * w
    return w - 0.1 * min(np.linalg.norm(w), 10) / np.linalg.norm(change) * change


def adamp(w, g, s, t):
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    change, decay = s["m"] / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-8), 1.0
    for rows in (w.shape[0], 1) if w.ndim > 1 else ():
        a, b, c = (x.reshape(rows, -1) for x in (w, g, change))
        length = np.linalg.norm(a, axis=1, keepdims=True)
        cosine = abs((a * b).sum(1, keepdims=True)) / length / np.linalg.norm(b, axis=1, keepdims=True)
        if cosine.max() < 5.0 / np.sqrt(a.shape[1]):
            change, decay = (c - a / length * (a / length * c).sum(1, keepdims=True)).reshape(w.shape), 0.1
            break
    return w * (1 - 0.1 * 0.01 * decay) - 0.1 / (1 - 0.9**t) * change


def bert(w, g, s, t):
    g = g * min(0.5 / (s["norm"] + 1e-6), 1)
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    done = (t - 1) / 4
    factor = done / 0.5 if done < 0.5 else (done - 1) / (0.5 - 1)
    return w - 0.1 * factor * (s["m"] / (np.sqrt(s["v"]) + 1e-6) + 0.01 * w)


def rmsprop_tf(w, g, s, t):
    g = g + 0.01 * w
    s["v"], s["a"] = s.get("v", 1) + 0.1 * (g * g - s.get("v", 1)), s.get("a", 0) + 0.1 * (g - s.get("a", 0))
    s["b"] = 0.9 * s.get("b", 0) + 0.1 * g / np.sqrt(s["v"] - s["a"] ** 2 + 1e-10)
    return w - s["b"]


OWN = {
    "Lamb": (lamb, {"weight_decay": 0.01}),
    "AdamP": (adamp, {"weight_decay": 0.01, "delta": 5.0}),
    "BertAdam": (bert, {"warmup": 0.5, "t_total": 4, "max_grad_norm": 0.5}),
    "RMSpropTF": (rmsprop_tf, {"weight_decay": 0.01, "momentum": 0.9, "centered": True}),
}


@pytest.mark.parametrize("name", OWN)
def test_fused_optimizers_that_pytorch_has_not(name):
    rule, named = OWN[name]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).npu()
    optimizer = getattr(torch_npu.optim, f"NpuFused{name}")(model.parameters(), lr=0.1, **named)
    wanted, states = [p.detach().cpu().double().numpy() for p in model.parameters()], [{}, {}]
    for t in range(1, 4):
        optimizer.zero_grad()
        loss = optimizer.step(lambda: (value := model(torch.ones(2, 3).npu()).square().sum()).backward() or value)
        grads = [p.grad.cpu().double().numpy() for p in model.parameters()]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        for state in states:
            state["norm"] = norm
        wanted = [rule(w, g, s, t) for w, g, s in zip(wanted, grads, states)]
        assert loss.shape == ()
    for p, w in zip(model.parameters(), wanted):
        torch.testing.assert_close(p.detach().cpu().double(), torch.from_numpy(w), rtol=1e-4, atol=1e-6)
    assert optimizer.clip_optimizer_grad_norm_fused_(1e9) > 0


def test_wrong_rates():
    for named, said in (
        ({"lr": -1}, "Invalid learning rate"),
        ({"lr": 1, "warmup": 2}, "Invalid warmup"),
        ({"lr": 1, "b1": 1.0}, "Invalid b1"),
    ):
        with pytest.raises(ValueError, match=said):
            torch_npu.optim.NpuFusedBertAdam([torch.ones(1, requires_grad=True)], **named)


def test_gradients_are_clipped_together():
    x = torch.ones(4).npu().requires_grad_()
    optimizer = torch_npu.optim.NpuFusedSGD([x], lr=1.0)
    (x * 3).sum().backward()
    norm = optimizer.clip_optimizer_grad_norm_fused_(1.0)
    assert round(float(norm), 4) == 6 and round(float(x.grad.norm()), 4) == 1


# -- limits ---------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:limits of cores")
def test_limits_of_cores():
    stream = torch.npu.Stream()
    before = torch.npu.get_device_limit(0)
    assert set(before) == {"cube_core_num", "vector_core_num"} and torch.npu.get_stream_limit(stream) == before
    torch.npu.set_device_limit(0, 12, 20)
    assert torch.npu.get_device_limit("npu:0") == {"cube_core_num": 12, "vector_core_num": 20}
    torch.npu.set_stream_limit(stream, vector_num=4)
    assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 12, "vector_core_num": 4}
    torch.npu.reset_stream_limit(stream)
    assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 12, "vector_core_num": 20}
    torch.npu.set_device_limit(0, *before.values())
    with pytest.raises(ValueError, match="vector_core_num must be at least 1, or -1"):
        torch.npu.set_stream_limit(stream, 4, 0)
    with pytest.warns(UserWarning, match="have no effect: cores cannot be limited here"):
        torch.npu.set_stream_limit(stream, 4)


# -- attention over blocks ------------------------------------------------------------------------------------------
def paged_case():
    torch.manual_seed(0)
    keys, values = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    query = torch.randn(3, 4, 8)
    table, lengths = torch.tensor([[5, 1, 0], [2, 0, 0], [3, 4, 1]], dtype=torch.int32), torch.tensor([7, 3, 0])
    wanted = torch.zeros(3, 4, 8)
    for i, length in enumerate(lengths.tolist()):
        k, v = (cache[table[i].long()].flatten(0, 1)[:length] for cache in (keys, values))
        for head in range(4 if length else 0):
            shares = (query[i, head] @ k[:, head // 2].T * 0.3).softmax(-1)
            wanted[i, head] = shares @ v[:, head // 2]
    return query.npu(), keys.npu(), values.npu(), table.npu(), lengths, wanted


@pytest.mark.parametrize("backend", [None, "airgraph", "npugraph_ex"])
def test_paged_attention(backend):
    query, keys, values, table, lengths, wanted = paged_case()

    def attend(out):
        torch_npu._npu_paged_attention(query, keys, values, 2, 4, 0.3, table, lengths, out)
        return out + 1

    torch._dynamo.reset()
    run = attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True)
    out = torch.full((3, 4, 8), float("nan")).npu()
    after = run(out)
    torch.testing.assert_close(out.cpu(), wanted)
    torch.testing.assert_close(after.cpu(), wanted + 1)
    assert (
        torch_npu._npu_paged_attention_get_workspace(query, keys, values, 2, 4, 0.3, table, lengths, out).numel() == 0
    )


def test_tokens_go_into_their_slots():
    keys, values = torch.zeros(2, 3, 1, 2).npu(), torch.zeros(2, 3, 1, 2).npu()
    rows = torch.arange(4.0).reshape(2, 1, 2).npu()
    torch_npu._npu_reshape_and_cache(rows, -rows, keys, values, torch.tensor([4, 0], dtype=torch.int32).npu())
    wanted = torch.zeros(6, 1, 2)
    wanted[4], wanted[0] = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 3.0]])
    assert torch.equal(keys.cpu().flatten(0, 1), wanted) and torch.equal(values.cpu().flatten(0, 1), -wanted)
