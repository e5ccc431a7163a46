"""A call that fails raises what eager raises, in every mode, at every call, and the next good call is right."""

import pytest
import torch

import airgraph
from airgraph.errors import AirgraphError

MODES = {
    "native": airgraph.backend(engine="native"),
    "reference": airgraph.backend(engine="reference"),
    "reduce-overhead": airgraph.backend(mode="reduce-overhead"),
    "npugraphs": "npugraphs",
    "npugraph_ex": "npugraph_ex",
}
ROWS = torch.arange(12.0).reshape(4, 3)


class OwnError(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


@torch.library.custom_op("exceptions::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if x.min() < 0:
        raise OwnError(7, "negative")
    return x.clone()


@positive.register_fake
def _(x):
    return torch.empty_like(x)


# name: (function, arguments it fails with, arguments it works with or None)
FAILING = {
    "index": (lambda x, i: x[i] + 1, (ROWS, torch.tensor([7])), (ROWS, torch.tensor([3]))),
    "embedding": (lambda x, i: torch.embedding(x, i) * 2, (ROWS, torch.tensor([7])), (ROWS, torch.tensor([1]))),
    "index_put": (
        lambda x, i: torch.index_put(x, (i,), torch.ones(3)),
        (ROWS, torch.tensor([-5])),
        (ROWS, torch.tensor([-4])),
    ),
    "uint16": (lambda a: a + a, (torch.ones(3, dtype=torch.uint16),), None),
    "singular": (torch.linalg.inv, (torch.zeros(2, 2),), (torch.eye(2),)),
    "own_class": (lambda x: positive(x) + 1, (-ROWS,), (ROWS,)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAILING)
def test_exceptions_have_the_type_of_eager(name, mode):
    function, bad, good = FAILING[name]
    with pytest.raises(Exception) as eager:
        function(*bad)
    compiled = torch.compile(function, backend=MODES[mode])
    for _ in range(3):  # compiled, captured, replayed
        with pytest.raises(eager.type) as ours:
            compiled(*bad)
        assert isinstance(ours.value, AirgraphError) or type(ours.value) is OwnError
        if good is not None:
            torch.testing.assert_close(compiled(*good), function(*good))
