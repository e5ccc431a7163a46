"""What several tests of the CPU engine need."""

import pytest
import torch


def with_threads(count):
    @pytest.fixture
    def threads():
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        yield
        torch.set_num_threads(before)

    return threads


two_threads, four_threads = with_threads(2), with_threads(4)
