"""airgraph.compile: a model ahead of time, and what its calls must agree to."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

import airgraph
from airgraph.engine.native import dict_watch
from airgraph.errors import BindError, ConfigError, ConvertError


class Scaled(torch.nn.Module):
    def forward(self, x, k, mode="up"):
        return x * k if mode == "up" else x


def test_numbers_of_the_example_are_part_of_the_graph():
    x = torch.ones(3)
    fast = airgraph.compile(Scaled(), (x, 3), {"mode": "up"}, engine="reference")
    assert torch.equal(fast(x, 3, mode="up"), x * 3)
    with pytest.raises(BindError, match="argument 'k' is part of the graph: it must be 3, got 5"):
        fast(x, 5, mode="up")
    with pytest.raises(BindError, match="argument 'mode' is part of the graph: it must be 'up', got 'down'"):
        fast(x, 3, mode="down")


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)])

    def forward(self, input, scale=None, *, shift=None):
        result = self.layers[1](self.layers[0](input).relu())
        result = result if scale is None else result * scale
        return result if shift is None else result + shift


def test_one_tensor_a_function_a_method_and_an_exported_program():
    model, x = TwoLayers(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(airgraph.compile(model, x, engine="reference")(x), expected)
        assert torch.equal(airgraph.compile(model.forward, x, engine="reference")(x), expected)
        assert torch.equal(airgraph.compile(lambda a, b: a @ b, (x, x.t()), engine="reference")(x, x.t()), x @ x.t())
        program = torch.export.export(model, (x,))
        assert torch.equal(airgraph.compile(program, engine="reference")(x), expected)
    with pytest.raises(ConfigError, match=r"TwoLayers cannot be compiled\n  try: Model\(\) instead of Model"):
        airgraph.compile(TwoLayers, x)
    with pytest.raises(ConfigError, match="example_args are the positional arguments"):
        airgraph.compile(model, {"input": x})


def test_arguments_by_place_and_by_name():
    model, x = TwoLayers(), torch.randn(3, 4)
    fast = airgraph.compile(model, (x,), {"shift": x[:, :2]}, engine="reference")
    expected = fast(x, shift=x[:, :2])
    assert torch.equal(fast(input=x, shift=x[:, :2]), expected)
    assert torch.equal(fast(shift=x[:, :2], input=x, scale=None), expected)
    compiled = "\n  compiled: (input: float32[3, 4], shift: float32[3, 2])"
    for call, text in (
        (lambda: fast(x), f"argument 'shift' is missing{compiled}"),
        (lambda: fast(x, x, shift=x), f"argument 'scale' was not given when the model was compiled{compiled}"),
        (lambda: fast(x, x, x, x), f"too many positional arguments{compiled}"),
        (lambda: fast(x, shfit=x), f"got an unexpected keyword argument 'shfit'{compiled}"),
        (lambda: fast([x], shift=x), "the arguments have another structure than those the model was compiled for"),
    ):
        with pytest.raises(BindError) as caught:
            call()
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("engine", ["reference", "native"])
def test_a_wrong_argument_is_named_as_the_user_names_it(engine):
    model, x = TwoLayers(), torch.randn(3, 4)
    fast = airgraph.compile(model, x, engine=engine)
    for wrong, text in (
        (x[:, :3], "argument 'input' must have shape [3, 4], got [3, 3]\n  try: compile again for these arguments"),
        (
            x.double(),
            "argument 'input' must be torch.float32, got torch.float64\n  try: convert it: .to(torch.float32)",
        ),
        (3, "argument 'input' must be a tensor, got int"),
    ):
        with pytest.raises(BindError) as caught:
            fast(wrong)
        assert str(caught.value).startswith(text)
    model.double()
    with pytest.raises(BindError, match=r"argument 'layers\.0\.weight' must be torch\.float32, got torch\.float64"):
        fast(x)


def test_a_compiled_model_is_a_module():
    model, x = TwoLayers(), torch.randn(3, 4)
    fast = airgraph.compile(model, x, engine="reference")
    assert isinstance(fast, torch.nn.Module)
    assert {*fast.state_dict()} == {*model.state_dict()} == {n for n, _ in fast.named_parameters()}
    twin = copy.deepcopy(fast)
    fast.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not fast(x).any() and not model(x).any() and twin(x).any()
    text = repr(fast)
    assert text.startswith(
        "CompiledModel(TwoLayers(input: float32[3, 4]); 4 parameters and buffers of 120 bytes; compiled in"
    )
    assert fast.eval() is fast and not fast.training
    with pytest.raises(BindError, match=r"is for inference and cannot train\n  try: torch\.compile\("):
        fast.train()
    with pytest.raises(BindError, match="cannot be pickled"):
        pickle.dumps(fast)


def test_a_compiled_method_is_an_attribute_of_its_own_model(tmp_path):
    model, x = TwoLayers(), torch.randn(3, 4)
    names, expected = {*model.state_dict()}, model(x)
    model.fast = airgraph.compile(model.forward, x, engine="reference")
    assert not isinstance(model.fast, torch.nn.Module)
    assert {*model.state_dict()} == {*model.fast.state_dict()} == names
    assert torch.equal(model.fast(input=x), expected)
    assert repr(model.fast).startswith("CompiledModel(forward(input: float32[3, 4]); 4 parameters and buffers of")
    twin, copied = copy.deepcopy(model.fast), copy.deepcopy(model)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not model.fast(x).any() and torch.equal(twin(x), expected) and torch.equal(copied.fast(x), expected)
    copied.load_state_dict(model.state_dict())
    assert not copied.fast(x).any()
    with pytest.raises(BindError, match="cannot be pickled"):
        pickle.dumps(model.fast)
    with pytest.raises(BindError, match="is for inference and cannot train"):
        model.fast.train()
    assert torch.equal(airgraph.load(airgraph.save(twin, tmp_path / "twin.airp"))(x), expected)


def test_names_in_dumps(tmp_path):
    model, x = TwoLayers(), torch.randn(3, 4)
    torch.compile(model, backend=airgraph.backend(dump="py", dump_path=str(tmp_path)))(x)
    airgraph.compile(model, x, dump="pbtxt", dump_path=str(tmp_path))
    text = next(tmp_path.glob("dynamo_original_*.py")).read_text()
    assert "# layers.0.weight\nprimals_1_0 = ge.Data(" in text and "# input\n" in text
    text = next(tmp_path.glob("dynamo_original_*.pbtxt")).read_text()
    assert 's: "layers.1.bias"' in text and 's: "input"' in text and 's: "layers.0"' in text


class Renamed(torch.nn.Module):
    """Its methods call the module something else than `self`."""

    def __init__(this):
        super().__init__()
        this.fn = torch.nn.Linear(4, 4)

    def forward(this, other, x):
        x = other(this.fn(x))
        torch._dynamo.graph_break()
        return x * this.fn.bias


def test_names_where_forward_does_not_say_self(tmp_path):
    compiled = torch.compile(Renamed(), backend=airgraph.backend(dump="pbtxt", dump_path=str(tmp_path)))
    compiled(torch.nn.Linear(4, 4), torch.randn(3, 4))
    first, second = (file.read_text() for file in sorted(tmp_path.glob("dynamo_original_*.pbtxt")))
    for name in ("fn.weight", "fn.bias", "other.weight", "other.bias", "x", "fn", "other"):
        assert f's: "{name}"' in first
    assert 's: "fn.bias"' in second and 's: "this' not in first + second


def test_a_dynamic_number_is_not():
    x = torch.ones(3)
    shapes = {"x": {0: torch.export.Dim.AUTO}, "k": torch.export.Dim.AUTO}
    fast = airgraph.compile(Scaled(), (x, 3), dynamic_shapes=shapes, engine="reference")
    assert torch.equal(fast(torch.ones(5), 7), torch.full((5,), 7.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_arguments_of_rare_types_on_the_native_engine(dtype):
    class Widen(torch.nn.Module):
        def forward(self, x, y):
            return x + y.float(), y.clone()

    x, y = torch.ones(4), torch.tensor([1.0, 2, 4, 8]).to(dtype)
    found, again = airgraph.compile(Widen(), (x, y), engine="native")(x, y)
    assert torch.equal(found, x + y.float())
    assert again.dtype == dtype and torch.equal(again.float(), y.float())


@pytest.mark.parametrize(
    "options", [{"engine": "native"}, {"engine": "reference"}, {"mode": "reduce-overhead"}], ids=str
)
@pytest.mark.parametrize("tags", [True, False], ids=["by version tags", "by entries"])
def test_weights_that_are_replaced_are_seen(options, tags, monkeypatch):
    if not tags:
        monkeypatch.setattr(dict_watch, "native_comparison", lambda: None)
    model, x = TwoLayers(), torch.randn(3, 4)
    fast = airgraph.compile(model, x, **options)

    def check():
        for _ in range(3):  # a replay holds addresses
            torch.testing.assert_close(fast(x), model(x).detach())

    check()
    model.layers[0].weight = torch.nn.Parameter(torch.randn(4, 4))
    check()
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True)
    check()
    model.layers[1] = torch.nn.Linear(4, 2)
    check()
    model.layers[1]._parameters["weight"] = torch.nn.Parameter(torch.randn(2, 4))
    model.layers[1].register_buffer("added", torch.ones(1))
    check()
    taken = model.layers[0].bias
    del model.layers[0].bias
    with pytest.raises(BindError, match=r"the model no longer has 'layers\.0\.bias'"):
        fast(x)
    model.layers[0].register_buffer("bias", taken.detach() + 1)
    check()
    model.layers[1].bias = None
    with pytest.raises(BindError, match=r"the model no longer has 'layers\.1\.bias', which it was compiled with"):
        fast(x)
    model.layers = torch.nn.ModuleList([model.layers[0]])
    with pytest.raises(BindError, match=r"the model no longer has 'layers\.1\.weight'"):
        fast(x)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_ranges_of_sizes_are_enforced(engine):
    model, x = TwoLayers(), torch.randn(5, 4)
    shapes = {"input": {0: torch.export.Dim("batch", min=3, max=8)}}
    fast = airgraph.compile(model, x, dynamic_shapes=shapes, engine=engine)
    for size in (3, 8):
        assert fast(torch.randn(size, 4)).shape == (size, 2)
    for size in (2, 9):
        with pytest.raises(BindError, match=f"argument 'input' must have a size of 3 to 8 in dimension 0, got {size}"):
            fast(torch.randn(size, 4))


def test_what_was_assumed_of_sizes_is_checked():
    class Halves(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] > 6 else x - 1

    x = torch.randn(9)
    fast = airgraph.compile(Halves(), x, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}, engine="reference")
    assert torch.equal(fast(x), x + 1)
    with pytest.raises(BindError, match="argument 'x' must have a size of at least 7 in dimension 0, got 4"):
        fast(x[:4])


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_sparse_arguments_are_refused_by_name(kind, engine):
    model, x = TwoLayers(), torch.randn(3, 4)
    fast = airgraph.compile(model, x, engine=engine)
    with pytest.raises(BindError, match=r"argument 'input' must be a dense tensor, got torch\.(.|\n)*try: convert it"):
        fast(getattr(x, kind)())
    torch.testing.assert_close(fast(x), model(x).detach())


def test_names_of_its_own_are_not_the_models():
    """A buffer called `run` stays the model's."""

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("run", torch.zeros(1))
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.run.add_(1)
            return x + self.run + self.count

    model = Counts().eval()
    fast = airgraph.compile(model, torch.ones(2))
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0)) and float(model.run) == 1


def test_a_sparse_result_is_refused_in_words():
    class Sparse(torch.nn.Module):
        def forward(self, x):
            return x.to_sparse(), x + 1

    with pytest.raises(ConvertError, match=r"a torch\.sparse_coo tensor cannot enter or leave a graph"):
        airgraph.compile(Sparse(), (torch.eye(3),))


class Counting(torch.nn.Module):
    """Writes to a buffer, to a tensor that is none, to one in an object, and to a part of one in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(3))
        self.plain, self.held, self.listed = (
            torch.zeros(3),
            SimpleNamespace(length=torch.tensor(0)),
            [torch.zeros(2, 3)],
        )

    def forward(self, x):
        self.buffer.add_(1)
        self.plain.add_(1).mul_(2)
        self.held.length.add_(1)
        self.listed[0][1].add_(1)
        self.listed[0].index_copy_(0, torch.tensor([0]), x[:1])
        return x + self.buffer + self.plain + self.held.length + self.listed[0]

    def state(self):
        return [self.buffer, self.plain, self.held.length, *self.listed]


@pytest.mark.parametrize("name", [None, "counting"])
def test_compiling_leaves_the_models_state(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    x, model, eager = torch.randn(2, 3), Counting(), Counting()
    compiled = airgraph.compile(model, x, **({"cache": name} if name else {}))
    for ours, theirs in zip(model.state(), eager.state(), strict=True):
        assert torch.equal(ours, theirs)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x))
    for ours, theirs in zip(model.state(), eager.state(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_engine_of_the_models_device_is_prepared(monkeypatch):
    """Also where the arguments are elsewhere: a model on a GPU does not have the CPU's kernels compiled."""

    class Prepared(Exception):
        pass

    def prepare(config, device):
        raise Prepared(device.type)

    monkeypatch.setattr("airgraph.api.prepare", prepare)
    with pytest.raises(Prepared, match="meta"):
        airgraph.compile(torch.nn.Linear(4, 4, device="meta"), torch.randn(2, 4))
    with pytest.raises(Prepared, match="cpu"):
        airgraph.compile(torch.nn.Linear(4, 4), torch.randn(2, 4))
