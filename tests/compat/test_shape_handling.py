"""torch_npu's shape handling: gears, padding, splitting, and what theirs gets wrong."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from airgraph.compat import shape_handling
from airgraph.compat.shape_handling import ShapeHandling
from airgraph.gears import Gears, read_configs, read_functions, times_gears

BATCH4 = [{"type": "BATCHSIZE", "gears": [4, 8]}]


class Counting:
    """A backend that runs graphs as they are, and counts."""

    def __init__(self):
        self.graphs, self.shapes = 0, []

    def __call__(self, gm, inputs, **kwargs):
        self.graphs += 1

        def run(*args):
            self.shapes.append(tuple(args[-1].shape))
            return gm(*args)

        return run


@pytest.fixture(autouse=True)
def refusals_are_errors():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="shape handling:.*")
        yield


def handled(function, configs=None, functions=None, backend=None, **options):
    backend = backend or Counting()
    fast = torch.compile(
        function,
        backend=backend,
        **options,
        options={"enable_shape_handling": True, "shape_handling_configs": configs, "shape_handling_dict": functions},
    )
    return fast, backend


def same(function, fast, *args):
    torch.testing.assert_close(fast(*args), function(*args))


# -- settings -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "low, high, gears",
    [
        (1, 1024, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        (3, 20, (3, 4, 8, 16, 20)),
        (16, 256, (16, 32, 64, 128, 256)),
        (5, 6, (5, 6)),
        (10, 10, (10,)),
        (1000, 8192, (1000, 1024, 2048, 4096, 8192)),
    ],
)
def test_gears_by_times(low, high, gears):
    assert times_gears(low, high) == gears
    (config,) = read_configs([{"type": "BATCHSIZE", "min_size": low, "max_size": high}])
    assert config.gears == gears


def test_defaults():
    assert read_configs(None) == read_configs([]) == (Gears("BATCHSIZE", times_gears(1, 1024), (0,), (), None),)
    (config,) = read_configs([{"type": "SEQLEN", "gears": [64, 16]}])
    assert config == Gears("SEQLEN", (16, 64), (1,), (), None)
    assert [config.choose(n) for n in (1, 16, 17, 65)] == [16, 16, 64, None]


def test_several_dimensions_of_a_batch():
    """The first counts."""
    assert read_configs([{"type": "BATCHSIZE", "dimensions": [1, 2]}])[0].dimensions == (1,)


WRONG = {
    "currently supports only two dimensions": [{"type": "SEQLEN"}] * 3,
    "two entries have the type 'SEQLEN'": [{"type": "SEQLEN"}] * 2,
    "type must be 'BATCHSIZE' or 'SEQLEN', got 'WIDTH'": [{"type": "WIDTH"}],
    "type must be 'BATCHSIZE' or 'SEQLEN', got None": [{}],
    "unknown key 'gear'": [{"type": "SEQLEN", "gear": [1]}],
    "policy must be 'TIMES' or 'CUSTOM', got 'ADD'": [{"type": "SEQLEN", "policy": "ADD"}],
    "only the TIMES policy supports passing min_size and max_size": [{"type": "SEQLEN", "policy": "CUSTOM"}],
    "gears must be a list of whole numbers from 0 on, got 4": [{"type": "SEQLEN", "gears": 4}],
    "indices must be a list of whole numbers from 0 on, got \\[-1\\]": [{"type": "SEQLEN", "indices": [-1]}],
    "indices \\[0, 0\\] has a number twice": [{"type": "SEQLEN", "indices": [0, 0]}],
    "2 dimensions for 0 indices": [{"type": "SEQLEN", "dimensions": [1, 2]}],
    "value must be a number, got '0'": [{"type": "SEQLEN", "value": "0"}],
    "1 <= min_size <= max_size must hold, got 4 and 3": [{"type": "SEQLEN", "min_size": 4, "max_size": 3}],
    "BATCHSIZE takes up to 64 gears from 1 to 8192, got 1 from 9000 to 9000": [{"type": "BATCHSIZE", "gears": [9000]}],
    "BATCHSIZE takes up to 64 gears from 1 to 8192, got 65": [{"type": "BATCHSIZE", "gears": list(range(1, 66))}],
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_settings(said):
    with pytest.raises(ValueError, match=said):
        ShapeHandling(WRONG[said])


def test_wrong_functions():
    with pytest.raises(ValueError, match="shape_handling_dict: unknown key 'pre'"):
        read_functions({"pre": print})
    with pytest.raises(ValueError, match="re_pre_fn must be a function, got int"):
        read_functions({"re_pre_fn": 3})


# -- padding --------------------------------------------------------------------------------------------------------
def f(x):
    return torch.relu(x) * 2 + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_two_compilations_for_four_shapes(fullgraph):
    fast, backend = handled(f, BATCH4, fullgraph=fullgraph)
    for rows in (3, 4, 5, 6, 3):
        same(f, fast, torch.randn(rows, 7))
    assert backend.graphs == 2 and backend.shapes == [(4, 7), (8, 7), (8, 7), (4, 7)]


def test_without_it_nothing_changes():
    backend = Counting()
    fast = torch.compile(f, backend=backend, options={"enable_shape_handling": False})
    same(f, fast, torch.randn(3, 7))
    assert backend.shapes == [(3, 7)] and not hasattr(fast, "shape_handling")


def test_hyphens():
    backend = Counting()
    fast = torch.compile(f, backend=backend, options={"enable-shape-handling": True, "shape-handling-configs": BATCH4})
    for rows in (3, 5):
        same(f, fast, torch.randn(rows, 7))
    assert backend.shapes == [(8, 7)]


def test_length_and_batch_are_cut():
    """S1: their outputs keep the padding of a length."""
    configs = [
        {"type": "SEQLEN", "min_size": 16, "max_size": 256},
        {"type": "BATCHSIZE", "min_size": 16, "max_size": 256},
    ]
    fast, backend = handled(f, configs)
    for shape in ((48, 96), (47, 90), (17, 20)):
        same(f, fast, torch.randn(shape))
    assert backend.shapes == [(64, 128), (32, 32)]


def test_a_batch_is_split():
    fast, backend = handled(f, [{"type": "BATCHSIZE"}])
    same(f, fast, torch.randn(30, 2))
    same(f, fast, torch.randn(2500, 2))
    assert backend.shapes == [(1024, 2), (1024, 2), (512, 2)]
    fast, backend = handled(f, [{"type": "BATCHSIZE", "gears": [64, 128]}])
    same(f, fast, torch.randn(30, 2))
    same(f, fast, torch.randn(200, 2))
    assert backend.shapes == [(128, 2), (128, 2)]


def test_a_length_above_the_largest_runs_as_it_is():
    """S2."""
    fast, backend = handled(f, [{"type": "SEQLEN", "gears": [8]}])
    same(f, fast, torch.randn(2, 5))
    same(f, fast, torch.randn(2, 20))
    assert backend.shapes == [(2, 20)]


def test_only_results_with_a_batch_are_cut_and_joined():
    """S3: a result of the batch's size by chance, one that has the batch elsewhere, one that has it not at all."""

    def g(x, table):
        return x @ table, table * 2, x.t(), {"first": table[0], "none": None}

    fast, backend = handled(g, [{"type": "BATCHSIZE", "gears": [4], "indices": [0]}])
    table = torch.randn(4, 4)
    for rows in (3, 3, 7):
        x = torch.randn(rows, 4)
        same(g, fast, x, table)
    assert len(backend.shapes) == 3


def test_arguments_that_come_back():
    def g(x, y):
        return x, y + x

    fast, _ = handled(g, BATCH4)
    fast(torch.randn(3, 2), torch.randn(3, 2))
    x = torch.randn(5, 2)
    assert fast(x, x + 1)[0] is x


def test_gradients():
    """S5: theirs detaches where a batch is split."""
    model = torch.nn.Linear(3, 2)
    expected = copy.deepcopy(model)
    fast, _ = handled(model, BATCH4)
    for rows in (3, 3, 11):
        x = torch.randn(rows, 3, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        (fast(x) ** 2).sum().backward()
        (expected(y) ** 2).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)


def test_a_module_stays_a_module():
    model = torch.nn.Linear(3, 2)
    fast, backend = handled(model, BATCH4)
    assert isinstance(fast, torch.nn.Module) and fast.weight is model.weight
    assert list(fast.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    for rows in (3, 5):
        same(model, fast, torch.randn(rows, 3))
    assert backend.shapes == [(8, 3)]


def test_a_decorator():
    backend = Counting()

    @torch.compile(backend=backend, options={"enable_shape_handling": True, "shape_handling_configs": BATCH4})
    def g(x):
        """What g does."""
        return x + 1

    for rows in (3, 5):
        assert torch.equal(g(torch.ones(rows)), torch.full((rows,), 2.0))
    assert backend.shapes == [(8,)] and (g.__name__, g.__doc__) == ("g", "What g does.")


# -- what must not be padded ----------------------------------------------------------------------------------------
REFUSED = {
    "ReduceMean reduces over s.*test_shape_handling.py": lambda x: x - x.mean(0),
    "SoftmaxV2 divides by a sum over s": lambda x: x.softmax(0),
    "the function returns a number, which may be a size": lambda x: (x + 1, x.shape[0]),
    "the function fixes dimension 0 of tensor 0 at 3": lambda x: x.view(3, 2) + 1,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_padding_would_change(said):
    """S4: theirs gives other numbers and says nothing."""
    function = REFUSED[said]
    fast, backend = handled(function, BATCH4)
    x = torch.randn(3, 2)
    with pytest.warns(UserWarning, match=f"shape handling: sizes are not padded here: .*{said}"):
        same(function, fast, x)
    same(function, fast, x + 1)
    assert backend.shapes == [(3, 2)]


def test_several_graphs():
    def g(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    fast, _ = handled(g, BATCH4)
    with pytest.warns(UserWarning, match="the function has 2 graphs; only one can be followed"):
        same(g, fast, torch.randn(3, 2))
    same(g, fast, torch.randn(5, 2))


def test_other_code_for_other_sizes():
    """A branch on the size: at a gear on its other side the function would do something else."""

    def g(x):
        return x + 1 if x.shape[0] < 4 else x - 1

    fast, backend = handled(g, BATCH4)
    for rows in (3, 3, 5, 2):
        same(g, fast, torch.randn(rows, 2))
    assert (8, 2) not in backend.shapes and (4, 2) not in backend.shapes


def test_sizes_of_one():
    fast, backend = handled(f, BATCH4)
    for rows in (1, 3, 1, 2):
        same(f, fast, torch.randn(rows, 7))
    assert backend.shapes == [(1, 7), (1, 7), (4, 7)]


def test_a_mask_hides_what_is_added():
    def g(x, mask):
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :]).squeeze(1)

    fast, backend = handled(g, [{"type": "SEQLEN", "gears": [8, 16]}])
    for length in (5, 6, 11):
        mask = torch.rand(2, length) > 0.3
        mask[:, 0] = True
        same(g, fast, torch.randn(2, length, 4), mask)
    assert len(backend.shapes) == 2


# -- state ----------------------------------------------------------------------------------------------------------
def test_an_exception_leaves_nothing_behind():
    """S8: theirs cuts the next result."""
    state = {"fail": False}

    class Failing(Counting):
        def __call__(self, gm, inputs, **kwargs):
            def run(*args):
                if state["fail"]:
                    raise RuntimeError("stop")
                return gm(*args)

            return run

    fast, _ = handled(f, BATCH4, backend=Failing())
    same(f, fast, torch.randn(3, 2))
    state["fail"] = True
    with pytest.raises(RuntimeError, match="stop"):
        fast(torch.randn(3, 2))
    state["fail"] = False
    same(f, fast, torch.randn(8, 2))


def test_nothing_of_the_users_is_written_to():
    """S12."""
    configs = [{"type": "BATCHSIZE", "gears": [8, 4]}, {"type": "SEQLEN", "dimensions": 1}]
    options = {"enable_shape_handling": True, "shape_handling_configs": configs}
    before = copy.deepcopy(options)
    fast = torch.compile(f, backend=Counting(), options=options)
    x = torch.randn(3, 7)
    same(f, fast, x)
    assert options == before and vars(x) == {}


def test_more_tensors_than_are_handled():
    """S9, S10: tensors without the size before and behind, and other ones at the next call."""

    def g(scale, x, extra):
        return x * scale + extra.sum()

    fast, backend = handled(g, [{"type": "BATCHSIZE", "gears": [4, 8], "indices": [1]}])
    for rows in (3, 5):
        same(g, fast, torch.tensor(2.0), torch.randn(rows, 2), torch.randn(9))
    assert len(backend.shapes) == 1
    fast, _ = handled(lambda x, y: x + y, BATCH4)
    same(lambda x, y: x + y, fast, torch.randn(3, 2), torch.randn(3, 2))
    same(lambda x, y: x + y, fast, torch.randn(5, 2), torch.randn(2))


def test_places_that_do_not_exist():
    fast, _ = handled(f, [{"type": "SEQLEN", "dimensions": [4], "indices": [0]}])
    with pytest.raises(ValueError, match="there is no dimension 4 in tensor 0 of 1"):
        fast(torch.randn(3, 2))
    fast, _ = handled(lambda x, y: x.sum() + y, [{"type": "BATCHSIZE", "indices": [0, 1]}])
    with pytest.raises(ValueError, match="the batch is 2, 3 in several tensors"):
        fast(torch.randn(3, 2), torch.randn(2))


def test_threads():
    """S11."""
    fast, _ = handled(f, BATCH4)
    fast(torch.randn(3, 2))
    wrong = []

    def work(seed):
        for rows in [2, 3, 5, 7, 11, 4] * 3:
            x = torch.randn(rows, 2)
            if not torch.equal(fast(x), f(x)):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == []


# -- the user's functions -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "names",
    [
        ("trans_pre_fn",),
        ("trans_post_fn",),
        ("re_pre_fn",),
        ("re_post_fn",),
        ("trans_pre_fn", "trans_post_fn", "re_pre_fn", "re_post_fn"),
    ],
)
def test_functions_of_the_users(names):
    """S7: each by itself too."""
    called = []

    def trans_pre_fn(*args, **kwargs):
        called.append("trans_pre_fn")
        return [args[0]]

    def trans_post_fn(groups):
        called.append("trans_post_fn")
        return [tuple(group) for group in groups], [{} for _ in groups]

    def re_pre_fn(outputs):
        called.append("re_pre_fn")
        return [[out["y"]] for out in outputs]

    def re_post_fn(tensors):
        called.append("re_post_fn")
        return {"y": tensors[0]}

    def g(x):
        return {"y": x * 3}

    functions = {name: function for name, function in locals().items() if name in names}
    fast, backend = handled(g, BATCH4, functions)
    for rows in (3, 5, 11):
        same(g, fast, torch.randn(rows, 2))
    assert set(called) == set(names) and backend.shapes == [(8, 2), (8, 2), (4, 2)]


# -- backends -------------------------------------------------------------------------------------------------------
def test_airgraph():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).eval()
    fast, _ = handled(model, BATCH4, backend="airgraph", fullgraph=True)
    with torch.no_grad():
        for rows in (3, 4, 5, 11):
            same(model, fast, torch.randn(rows, 6))


@pytest.mark.slow
def test_inductor():
    fast, _ = handled(f, BATCH4, backend="inductor", fullgraph=True)
    for rows in (3, 4, 5, 11):
        same(f, fast, torch.randn(rows, 7))


def test_uninstall():
    patched = torch.compile
    shape_handling.uninstall()
    try:
        assert torch.compile is not patched and torch.compile.__module__ == "torch"
        shape_handling.uninstall()
    finally:
        shape_handling.install()
    assert torch.compile is not patched
