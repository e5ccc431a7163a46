"""Where intermediates lie: lifetimes and sizes as text in, offsets as text out."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from airgraph.plan.lifetimes import Lifetimes, Span
from airgraph.plan.memory import BLOCK, Buffer, arrange, buffers, memory
from airgraph.plan.sizes import Sizes

N, M = sympy.symbols("n m", integer=True, positive=True)


def arranged(text, n=4, m=1, over=()):
    """`1: 0-3 64*n` a line, `out` behind an output's; (the arrangement, its sizes, spans and bytes by slot)."""
    sizes, spans, bytes_, outputs = Sizes([N, M]), {}, {}, []
    for line in text.strip().splitlines():
        slot, span, size, *out = line.replace(":", "").split()
        spans[int(slot)] = Span(*map(int, span.split("-")))
        bytes_[int(slot)] = sizes.term(sympy.sympify(size, locals={"n": N, "m": M}))
        outputs += [int(slot)] if out else []
    values = sizes.run({N: n, M: m})
    now = {slot: sizes.value(size, values) for slot, size in bytes_.items()}
    return memory(buffers(Lifetimes(spans, list(over)), now, bytes_, outputs), bytes_), sizes, spans, bytes_


def text(found, n, m=1):
    memory, sizes, spans, _ = found
    return memory.text({slot: f"t{slot}" for slot in spans}, sizes.run({N: n, M: m}))


CHAIN = """
    1: 0-1 64*n
    2: 1-2 128*n
    3: 2-3 64*n
    4: 3-9 32*n out
"""


def test_offsets_follow_the_sizes():
    found = arranged(CHAIN)
    assert text(found, 4) == "t1: block + 512\nt2: block + 0\nt3: block + 512\nt4: t4 + 0\nblock: 768"
    assert text(found, 10) == "t1: block + 1280\nt2: block + 0\nt3: block + 1280\nt4: t4 + 0\nblock: 1920"


def test_an_output_lends_its_memory_where_it_is_large_enough():
    found = arranged("1: 0-1 64*n\n2: 2-9 256*m out", n=4, m=4)
    assert text(found, 4, 4) == "t1: t2 + 0\nt2: t2 + 0\nblock: 0"
    assert text(found, 16, 4) == "t1: t2 + 0\nt2: t2 + 0\nblock: 0"
    assert text(found, 17, 4) == "t1: block + 0\nt2: t2 + 0\nblock: 1088"


def test_an_empty_tensor_where_another_one_begins():
    found = arranged("1: 0-0 1\n2: 0-0 0\n3: 1-9 1 out")
    assert text(found, 1) == "t1: t3 + 0\nt2: t3 + 0\nt3: t3 + 0\nblock: 0"


def test_one_over_the_other():
    found = arranged("1: 0-1 64*n\n2: 1-2 64*n\n3: 2-9 64 out", over=[(2, 1)])
    assert text(found, 3) == "t1: block + 0\nt2: block + 0\nt3: t3 + 0\nblock: 192"
    other = arranged("1: 0-1 64*n\n2: 1-2 256\n3: 2-9 64 out", over=[(2, 1)])  # only sometimes of the same size
    assert text(other, 4) == "t1: block + 0\nt2: block + 256\nt3: t3 + 0\nblock: 512"


lives = st.tuples(st.integers(0, 20), st.integers(0, 8))
amounts = st.tuples(st.integers(0, 300), st.sampled_from(["", "*n", "*m", "*n*m"]))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(lives, amounts, st.booleans()), max_size=12),
    st.lists(st.integers(1, 40), min_size=4, max_size=4),
)
def test_what_is_in_use_at_the_same_time_never_overlaps(tensors, values):
    """Whatever sizes the arrangement was made for."""
    lines = []
    for slot, ((first, more), (size, by), out) in enumerate(tensors, 1):
        lines.append(f"{slot}: {first}-{99 if out else first + more} {size}{by} {'out' if out else ''}")
    n, m, *others = values
    if not lines:
        return
    memory, sizes, spans, bytes_ = arranged("\n".join(lines), n, m)
    for now in ((n, m), others):
        check(memory, sizes.run(dict(zip((N, M), now))), spans, bytes_)


def check(memory, values, spans, bytes_):
    def number(x):
        return x if isinstance(x, int) else values[x.index]

    places = {s: (number(home), number(offset), number(bytes_[s])) for s, (home, offset) in memory.locations.items()}
    for s, (home, offset, size) in places.items():
        assert offset % 64 == 0
        assert offset + size <= (number(memory.size) if home == BLOCK else number(bytes_[home]))
        for other, (home2, offset2, size2) in places.items():
            meets = spans[s].first <= spans[other].last and spans[other].first <= spans[s].last
            if s < other and meets and home == home2:
                assert offset + size <= offset2 or offset2 + size2 <= offset


def test_small_ones_go_into_gaps_and_into_outputs():
    fixed, top = arrange(
        [Buffer([1], 640, 0, 1), Buffer([2], 640, 2, 3), Buffer([3], 64, 1, 2), Buffer([4], 128, 3, 9, 4)]
    )
    assert {slot: tuple(location) for slot, location in fixed.items()} == {1: (0, 0), 2: (0, 0), 3: (4, 0), 4: (4, 0)}
    assert top == 640


@pytest.mark.parametrize("count", [300])
def test_long_chains_stay_small(count):
    """What lies below what lies below is implied: the work for a new size grows with the tensors, not with their pairs."""
    chain = "\n".join(f"{i}: {i}-{i + 20} 64*n" for i in range(1, count))
    _, sizes, _, _ = arranged(chain)
    assert len(sizes.code) < 8 * count
