"""What several tests of the CPU engine need."""

import pytest
import torch

from airgraph.plan import groups


def with_threads(count):
    @pytest.fixture
    def threads():
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        yield
        torch.set_num_threads(before)

    return threads


two_threads, four_threads = with_threads(2), with_threads(4)


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made from now on."""
    found = []
    make = groups.make_plan

    def made(graph, boundary, target):
        found.append(make(graph, boundary, target))
        return found[-1]

    monkeypatch.setattr(groups, "make_plan", made)
    torch._dynamo.reset()
    return found
