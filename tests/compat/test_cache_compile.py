"""`cache_compile`: a second start captures nothing; what is stale, broken or foreign is compiled again."""

import logging
import os
import stat
import textwrap

import forked
import npugraph_ex
import pytest
import torch
import torchair

import airgraph
from airgraph import api


class Model(torch.nn.Module):
    """Prompt and decode in one class, with a cache of keys that decode writes to."""

    def __init__(self, folder, **options):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        cache = torchair.inference.cache_compile
        self.cached_prompt = cache(self.prompt, cache_dir=str(folder), **options)
        self.cached_decode = cache(self.decode, cache_dir=str(folder), **options)

    def prompt(self, x):
        return self.linear(x).relu() * self.scale

    def decode(self, x, keys, *, at):
        keys.index_copy_(0, at, x)
        return self.linear(keys).sum(0) + torch.tensor([1.0, 2.0, 3.0])


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("compiled_module"))


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs)


def use(model):
    x, keys = torch.randn(5, 4), torch.randn(6, 4)
    at = torch.tensor([2])
    same(model.cached_prompt(x), model.prompt(x))
    ours, theirs = keys.clone(), keys.clone()
    same(model.cached_decode(x[:1], ours, at=at), model.decode(x[:1], theirs, at=at))
    same(ours, theirs)


@pytest.fixture
def captures(monkeypatch):
    """How often a method was captured."""
    seen = []
    real = api.export_model
    monkeypatch.setattr(api, "export_model", lambda *args: seen.append(1) or real(*args))
    return seen


def test_a_second_start_captures_nothing(tmp_path, captures):
    use(Model(tmp_path))
    assert len(captures) == 2
    decode, prompt = files(tmp_path)
    folder = prompt.split("/")[0]
    assert folder.startswith("Model_dynamic_") and prompt == f"{folder}/prompt/compiled_module"
    assert decode == f"{folder}/decode/compiled_module"
    assert stat.S_IMODE((tmp_path / prompt).stat().st_mode) == 0o600
    model = Model(tmp_path)
    torch.nn.init.normal_(model.linear.weight)  # other values: the weights are the module's own
    use(model)
    model.linear.weight = torch.nn.Parameter(torch.randn(3, 4))
    use(model)
    assert len(captures) == 2 and files(tmp_path) == [decode, prompt]
    same(model.cached_prompt(torch.ones(9, 4)), model.prompt(torch.ones(9, 4)))  # another size


def test_another_process_needs_no_dynamo(tmp_path):
    code = textwrap.dedent("""
        import sys, torch, airgraph.compat
        airgraph.compat.install()
        import torchair
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 3)
                self.cached = torchair.inference.cache_compile(self.step)
            def step(self, x):
                return self.linear(x) + 1
        model, x = Model(), torch.randn(2, 4)
        torch.testing.assert_close(model.cached(x), model.step(x))
        from airgraph.journal import JOURNALS
        print([stage.name for journal in JOURNALS for stage in journal.stages if stage.name in ("convert", "read")])
    """)
    (tmp_path / "script.py").write_text(code)
    for expected in ("['convert', 'read']", "['read']"):
        environment = {**os.environ, "TORCHAIR_CACHE_HOME": str(tmp_path / "home")}
        done = forked.run(str(tmp_path / "script.py"), env=environment)
        assert done.stdout.strip().endswith(expected)
    assert len(files(tmp_path / "home")) == 1


def test_what_is_part_of_the_key(tmp_path):
    Model(tmp_path).cached_prompt(torch.randn(2, 4))
    Model(tmp_path, dynamic=False).cached_prompt(torch.randn(2, 4))
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    Model(tmp_path, config=config).cached_prompt(torch.randn(2, 4))
    Model(tmp_path, ge_cache=True).cached_prompt(torch.randn(2, 4))
    Model(tmp_path, global_rank=1, tp_rank=1, pp_rank=0).cached_prompt(torch.randn(2, 4))
    folders = [path.split("/")[:-2] for path in files(tmp_path)]
    names = sorted("_".join(folder[0].split("_")[:-1]) + "/" + "/".join(folder[1:]) for folder in folders)
    assert names == [
        "Model_dynamic/",
        "Model_dynamic/world1global_rank1_tp_rank1_pp_rank0",
        "Model_dynamic_aclgraphcache/",
        "Model_dynamic_gecache/",
        "Model_static/",
    ]


def test_custom_passes(tmp_path, captures):
    def double(gm, inputs, config):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = double
    x = torch.randn(2, 4)
    for _ in range(2):
        model = Model(tmp_path, config=config)
        same(model.cached_prompt(x), -model.linear(x) * 2)
    assert len(captures) == 1


@pytest.mark.parametrize("damage", ["cut", "foreign", "stale"])
def test_a_broken_cache_is_compiled_again(tmp_path, damage, caplog, captures):
    Model(tmp_path).cached_prompt(torch.randn(2, 4))
    (path,) = [tmp_path / name for name in files(tmp_path)]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "foreign":
        path.chmod(0o666)
    model = Model(tmp_path)
    if damage == "stale":
        model.linear.weight = torch.nn.Parameter(model.linear.weight.detach().double())
        model.linear.bias = torch.nn.Parameter(model.linear.bias.detach().double())
    x = torch.randn(2, 4, dtype=model.linear.weight.dtype)
    with warnings_of("torchair") as lines:
        same(model.cached_prompt(x), model.prompt(x))
    assert lines[0].startswith(f"Clear broken cache {path} of Model.prompt: ")
    assert len(captures) == 2 and files(tmp_path)


def test_other_sizes_than_what_was_kept(tmp_path):
    model = Model(tmp_path, dynamic=False)
    model.cached_prompt(torch.randn(2, 4))
    with warnings_of("torchair") as lines:
        for rows in (3, 2, 3):
            x = torch.randn(rows, 4)
            same(model.cached_prompt(x), model.prompt(x))
    assert len(lines) == 1 and lines[0].startswith("Skip cache as Model.prompt recompiled: ") and not files(tmp_path)


def test_what_cannot_be_kept(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cached = torchair.inference.cache_compile(self.step, cache_dir=str(tmp_path))

        def step(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    model, x = Odd(), torch.ones(3)
    with warnings_of("torchair") as lines:
        same(model.cached(x), x + 1)
        same(model.cached(-x), -x - 1)
    assert len(lines) == 1 and lines[0].startswith("Skip cache as Odd.step cannot be kept: ") and not files(tmp_path)


class NoModule:
    def decode(self, x):
        return x


@pytest.mark.parametrize("package", [torchair, npugraph_ex], ids=["torchair", "npugraph_ex"])
def test_errors(package, tmp_path):
    compile_ = package.inference.cache_compile
    with pytest.raises(ValueError, match=r"^Only method can be cached now, got <function "):
        compile_(lambda x: x)
    with pytest.raises(ValueError, match=r"^Only method of torch.nn.Module can be cached now, got <bound method "):
        compile_(NoModule().decode)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        compile_(torch.nn.Linear(2, 2).forward, speed=1)
    with pytest.raises(ValueError, match="nothing is not a file, or it is a link"):
        package.inference.readable_cache(str(tmp_path / "nothing"))


def test_the_backends_config_must_be_the_caches(tmp_path):
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    with pytest.raises(
        ValueError, match="config in current backend is different from the config during cache generation"
    ):
        torchair.inference.cache_compile(torch.nn.Linear(2, 2).forward, config=config, backend=backend)


def test_npugraph_ex(tmp_path, captures):
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        cached = npugraph_ex.inference.cache_compile(model.forward, cache_dir=str(tmp_path), dynamic=False)
        x = torch.randn(2, 4)
        for _ in range(3):
            assert torch.equal(cached(x), model(x))
    assert len(captures) == 1 and files(tmp_path)[0].startswith("Sequential_static_aclgraphcache_")
    with pytest.raises(ValueError, match="Invalid option 'nothing'"):
        npugraph_ex.inference.cache_compile(model.forward, options={"nothing": 1})


def test_on_the_npu(tmp_path, captures):
    x = torch.randn(2, 4).npu()
    for _ in range(2):
        model = Model(tmp_path).npu()
        result = model.cached_prompt(x)
        assert result.device.type == "npu"
        same(result.cpu(), model.prompt(x).cpu())
    assert len(captures) == 1


def test_readable(tmp_path, capsys):
    Model(tmp_path).cached_prompt(torch.randn(2, 4))
    (name,) = files(tmp_path)
    text = torchair.inference.readable_cache(str(tmp_path / name), file=str(tmp_path / "out.py"))
    assert capsys.readouterr().out.strip() == text.strip() == (tmp_path / "out.py").read_text().strip()
    assert stat.S_IMODE((tmp_path / "out.py").stat().st_mode) == 0o600
    assert "# name: Model.prompt\n" in text and "is 'linear.weight' of the module: float[3, 4]@" in text
    assert "ge.Relu(" in text and "# argument " in text
    assert airgraph.ir.text.from_py(text).of("Relu")
    assert torchair.inference.readable_cache(str(tmp_path / name), print_output=False) and not capsys.readouterr().out


class warnings_of:
    """The warnings of a logger, which does not propagate."""

    def __init__(self, name):
        self.logger, self.lines = logging.getLogger(name), []

    def __enter__(self):
        self.handler = logging.Handler(logging.WARNING)
        self.handler.addFilter(lambda record: record.levelno == logging.WARNING)
        self.handler.emit = lambda record: self.lines.append(record.getMessage())
        self.level = self.logger.level
        self.logger.setLevel(logging.WARNING)
        self.logger.addHandler(self.handler)
        return self.lines

    def __exit__(self, *error):
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.level)
