"""Watched memory: every write is seen, of whatever kind; what cannot be watched is refused; forked children."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from airgraph.engine.native import write_watch
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.engine.native.tables import FrameWords
from airgraph.engine.native.write_watch import LEAST, PAGE, WriteWatch, can_watch, watch_memory
from tests.engine.native.packed_models import assert_as_near_as_eager, compiled

pytestmark = pytest.mark.skipif(not can_watch(), reason="this kernel does not say which pages were written to")


def watched(tensor: torch.Tensor) -> tuple[WriteWatch, int]:
    watch = watch_memory(tensor)
    assert watch is not None
    generation = watch.settle()
    assert generation is not None and watch.unwritten(generation)
    return watch, generation


def numbers(pages: int = 40, offset: int = 5) -> torch.Tensor:
    """So many pages and a half, not where a page begins."""
    whole = torch.randn(PAGE * (pages + 2) // 4)
    return whole[offset : offset + PAGE * pages // 4 + 500]


# -- writes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [0, 1, 900, PAGE, 20 * 1024 + 7, -600, -1])
def test_a_single_number_at_any_place(place):
    x = numbers()
    watch, generation = watched(x)
    x.data[place] += 1
    assert not watch.unwritten(generation)
    again = watch.settle()
    assert again is not None and again != generation
    assert watch.unwritten(again) and not watch.unwritten(generation)


def by_numpy(x):
    x.numpy()[9000] = 3


def by_address(x):
    ctypes.c_float.from_address(x.data_ptr() + 4 * 9000).value = 2.5


def by_a_system_call(x):
    with open("/dev/zero", "rb", buffering=0) as file:
        assert os.preadv(file.fileno(), [memoryview(x.numpy())[9000:9002].cast("B")], 0) == 8


def by_another_thread(x):
    thread = threading.Thread(target=x.__setitem__, args=(9000, 4.0))
    thread.start()
    thread.join()


def with_the_same_value(x):
    x[9000] = x[9000].clone()


@pytest.mark.parametrize("write", [by_numpy, by_address, by_a_system_call, by_another_thread, with_the_same_value])
def test_kinds_of_writes(write):
    x = numbers()
    watch, generation = watched(x)
    write(x)
    assert not watch.unwritten(generation)


def test_reading_and_neighbours_do_not_count():
    whole = torch.randn(50 * PAGE // 4)
    x = whole[100 : 100 + 30 * PAGE // 4]
    watch, generation = watched(x)
    x.sum(), x.clone(), x.numpy().tobytes()
    whole[:100] = 0
    whole[100 + 30 * PAGE // 4 :] = 0
    assert watch.unwritten(generation)


def test_memory_that_nobody_has_written_to_yet():
    x = torch.from_numpy(np.zeros(64 * PAGE // 4, np.float32))
    watch, generation = watched(x)
    x[-5000] = 1
    assert not watch.unwritten(generation)


def test_watches_of_the_same_memory():
    """A second one protects the pages again: the first must not take an old write for none."""
    x = numbers(64)
    first, generation = watched(x)
    x[9000] = 1
    second, _ = watched(x[1024 : 40 * 1024])
    assert second is not first and not first.unwritten(generation)
    assert watch_memory(x) is first


def test_what_is_written_to_again_and_again_is_given_up():
    x = numbers()
    watch, _ = watched(x)
    for _ in range(write_watch.FEW - 1):
        x[9000] += 1
        assert watch.settle() is not None
    x[9000] += 1
    assert watch.settle() is None and watch_memory(x) is None


def test_time_in_between_makes_it_worth_while(monkeypatch):
    monkeypatch.setattr(write_watch, "SHORT", 0.0)
    x = numbers()
    watch, _ = watched(x)
    for _ in range(3 * write_watch.FEW):
        x[9000] += 1
        assert watch.settle() is not None


def test_nothing_is_left_behind():
    owner = write_watch.tracker()
    assert owner is not None
    gc.collect()
    free = len(owner.free)
    x = numbers()
    held = watched(x)
    assert len(owner.free) == free - 1
    del held
    gc.collect()
    assert len(owner.free) == free


# -- what is refused ----------------------------------------------------------------------------------------------------
def small():
    return torch.randn(LEAST // 4 - 1)


def shared():
    return torch.randn(40 * PAGE // 4).share_memory_()


def mapped(tmp_path, mode):
    path = tmp_path / "numbers"
    np.ones(40 * PAGE // 4, np.float32).tofile(path)
    return torch.from_numpy(np.memmap(path, np.float32, mode=mode))


def test_what_is_refused(tmp_path):
    for x in (shared(), mapped(tmp_path, "r+"), mapped(tmp_path, "c")):
        watch = watch_memory(x)
        assert watch is None or watch.settle() is None
        assert watch is None or watch.settle() is None  # nor the second time
    assert watch_memory(small()) is None


# -- several at once ----------------------------------------------------------------------------------------------------
def neighbours(*pages: int, apart: int = 3) -> list[torch.Tensor]:
    """Tensors of so many pages in one piece of memory, with pages of nobody between them."""
    whole = torch.randn(PAGE * (sum(pages) + apart * (len(pages) + 1)) // 4)
    ends = [sum(pages[: i + 1]) + apart * (i + 1) for i in range(len(pages))]
    return [whole[PAGE * (end - count) // 4 : PAGE * end // 4] for count, end in zip(pages, ends)]


def swept(tensors: list[torch.Tensor]) -> list[write_watch.Sweep]:
    """The sweeps of watches; these live as long."""
    return write_watch.sweeps([watched(x)[0] for x in tensors])


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("place", [0, PAGE, -1])
def test_a_sweep_sees_a_write_to_each_of_its_tensors(which, place):
    tensors = neighbours(20, 17, 40)
    inside = [x[PAGE // 4 : -PAGE // 4] for x in tensors]  # (what lies on pages at the ends is compared byte by byte)
    (sweep,) = swept(tensors)
    assert len(sweep.watches) == 3 and sweep.clean()
    inside[which][place] = 1.0
    assert not sweep.clean()


def test_a_sweep_passes_over_what_nobody_watches():
    tensors = neighbours(20, 20)
    (sweep,) = swept(tensors)
    whole = tensors[0]._base
    assert whole is not None
    gap = tensors[0].storage_offset() + tensors[0].numel() + 2 * PAGE // 4
    whole[gap : gap + 8] = 0
    assert sweep.clean()


def test_a_sweep_sees_pages_that_were_given_back():
    tensors = neighbours(20, 20)
    (sweep,) = swept(tensors)
    libc = write_watch.system_calls()
    page = sweep.watches[1].start + 5 * PAGE
    assert libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 4) == 0  # MADV_DONTNEED
    assert not sweep.clean()


def test_only_small_tensors_that_are_near_are_swept():
    large = write_watch.SMALL // PAGE + 2
    assert not swept(neighbours(20)) and not swept(neighbours(20, large, 20))
    assert not swept(neighbours(20, 20, apart=write_watch.NEAR // PAGE + 2))
    (sweep,) = swept(neighbours(large, 20, 20))
    assert [watch.size // PAGE for watch in sweep.watches] == [20, 20]


def test_memory_that_another_watch_gives_up_fits_no_more():
    """A sweep would pass over its pages."""
    x = numbers(64)
    part = watched(x[1024 : 40 * 1024])
    whole, generation = watched(x)
    del part
    gc.collect()
    assert not whole.unwritten(generation) and write_watch.tracker().cells[whole.cell] == 0


# -- children -----------------------------------------------------------------------------------------------------------
def in_child(check) -> None:
    """Run in a forked child, which ends with 0 if `check` holds."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_does_not_rely_on_its_parents_pages():
    x = numbers()
    watch, generation = watched(x)

    def check() -> bool:
        stale = watch.unwritten(generation)
        own, again = watched(x)
        x[9000] = 7
        return not stale and own is not watch and not own.unwritten(again)

    in_child(check)
    assert watch.unwritten(generation)
    x[9000] = 7
    assert not watch.unwritten(generation)


# -- programs -----------------------------------------------------------------------------------------------------------
def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(64, 80, 3, padding=1), nn.ReLU(), nn.Conv2d(80, 300, 1)).eval()


def products():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 384)).eval()


IN_PANELS = pytest.mark.skipif(vector_lanes() < 8, reason="products of this size are not packed here")
CASES = [pytest.param(convolutions, (1, 64, 9, 9)), pytest.param(products, (8, 384), marks=IN_PANELS)]


def single_number(module):
    module[0].weight.data.view(-1)[12345] = 0.1 + torch.rand(())


def first_number(module):
    module[2].weight.data.view(-1)[0] = 0.1 + torch.rand(())


def last_number(module):
    module[2].weight.detach().numpy().reshape(-1)[-1] = 0.1 + torch.rand(()).item()


def other_memory(module):
    module[0].weight.data = 0.05 * torch.randn_like(module[0].weight)


def assigned(module):
    module[0].weight = nn.Parameter(0.05 * torch.randn_like(module[0].weight))


def loaded(module):
    module.load_state_dict({name: 0.05 * torch.randn_like(t) for name, t in module.state_dict().items()})


def stepped(module):
    optimizer = torch.optim.SGD([module[2].weight], lr=0.01)
    module[2].weight.grad = torch.ones_like(module[2].weight)
    optimizer.step()


CHANGES = [single_number, first_number, last_number, other_memory, assigned, loaded, stepped]


@pytest.mark.parametrize(("make", "shape"), CASES)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_packed_parameter_is_seen(make, shape, change):
    module, x = make(), torch.randn(shape)
    run, native = compiled(module, x)
    assert len(native.frames[-1].tags) == 2 and native.frames[-1].packed
    for _ in range(2 * write_watch.FEW):  # packed again at first, later read as it is stored
        before = run(x)
        change(module)
        assert not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), module, x)
    assert len(native.frames) <= 4


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_the_same_result_as_without(make, shape, monkeypatch):
    module, x = make(), torch.randn(shape)
    run, _ = compiled(module, x)
    first = run(x)
    monkeypatch.setenv("AIRGRAPH_PACK", "frozen")
    plain, native = compiled(module, x)
    assert not native.frames[-1].tags
    assert_as_near_as_eager(plain(x), module, x)
    assert_as_near_as_eager(first, module, x)


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_change_in_a_child_is_seen(make, shape):
    module, x = make(), torch.randn(shape)
    run, _ = compiled(module, x)
    before = run(x)

    def check() -> bool:
        torch.set_num_threads(1)  # threads are not inherited
        same = torch.equal(run(x), before)
        single_number(module)
        changed = not torch.equal(run(x), before)
        assert_as_near_as_eager(run(x), module, x)
        return same and changed

    in_child(check)
    assert torch.equal(run(x), before)


def side_by_side() -> tuple[nn.Sequential, torch.Tensor]:
    """Four products whose weights lie in one piece of memory, and what lies in the middle of it."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4))).eval()
    *left, other, third, fourth = neighbours(26, 26, 20, 26, 26)
    for layer, place in zip(module, (*left, third, fourth)):
        values = layer.weight.detach()
        layer.weight = nn.Parameter(place[: values.numel()].view_as(values))
        layer.weight.data.copy_(values)
    return module, other


@IN_PANELS
@pytest.mark.parametrize("which", range(4))
def test_a_change_of_a_weight_that_is_swept_is_seen(which):
    (module, _), x = side_by_side(), torch.randn(64, 160)
    run, native = compiled(module, x)
    frame = native.frames[-1]
    assert len(frame.tags) == 4 and frame.words[FrameWords.SWEEPS] == 1
    before = run(x)
    assert torch.equal(run(x), before) and native.frames == [frame]
    module[which].weight.data.view(-1)[12345] = 0.3
    assert not torch.equal(run(x), before)
    assert_as_near_as_eager(run(x), module, x)


@IN_PANELS
def test_a_write_to_watched_memory_of_somebody_else_changes_nothing():
    """The sweep finds it; then every weight is asked for by itself."""
    (module, other), x = side_by_side(), torch.randn(64, 160)
    run, native = compiled(module, x)
    before, frame = run(x), native.frames[-1]
    held = watched(other)
    other[3000] = 1.0
    (sweep,) = write_watch.sweeps([tag.watch for tag in frame.tags.values()])
    assert held and not sweep.clean()
    assert torch.equal(run(x), before) and native.frames == [frame]
    module[3].weight.data.view(-1)[12345] = 0.3
    assert not torch.equal(run(x), before)
    assert_as_near_as_eager(run(x), module, x)


def test_shared_memory_is_packed_in_every_call():
    module, x = convolutions().share_memory(), torch.randn(1, 64, 9, 9)
    run, native = compiled(module, x)
    assert not native.frames[-1].tags
    single_number(module)
    assert_as_near_as_eager(run(x), module, x)


def test_where_nothing_can_be_watched(monkeypatch):
    monkeypatch.setattr(write_watch, "can_watch", lambda: False)
    module, x = products(), torch.randn(8, 384)
    run, native = compiled(module, x)
    assert not native.frames[-1].tags
    single_number(module)
    assert_as_near_as_eager(run(x), module, x)
