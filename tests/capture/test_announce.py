"""Where a graph works."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from airgraph.capture.announce import device_of


def test_the_device_of_a_graph_is_that_of_its_accelerator():
    on_host = make_fx(lambda x: x * 2, tracing_mode="fake")(torch.ones(3))
    made = make_fx(lambda x: torch.ones(3, device="cuda:0") * 2, tracing_mode="fake")(torch.ones(3))
    assert device_of([torch.ones(3)], on_host) == torch.device("cpu")
    assert device_of([torch.ones(3), torch.ones(3, device="meta")], on_host) == torch.device("meta")
    assert device_of([], made) == device_of([torch.ones(3), 7], made) == torch.device("cuda:0")
