"""Lifetimes and barriers: steps as text in, spans as text out."""

from __future__ import annotations

from airgraph.plan.lifetimes import Access, lifetimes, timeline


def parsed(text):
    """`shared: 1 2 -> 3`, `single: ...`, `call: ...`; a step with a leading + has the origin of the one before."""
    accesses, origin = [], object()
    for line in text.strip().splitlines():
        kind, _, rest = line.strip().removeprefix("+").partition(": ")
        reads, writes = (frozenset(int(n) for n in part.split() if n != "-") for part in rest.split(" -> "))
        origin = origin if line.strip().startswith("+") else object()
        accesses.append(Access(reads, writes, origin, kind == "call", kind in ("call", "single")))
    return timeline(accesses)


def test_threads_wait_where_they_would_meet():
    found = parsed("""
        shared: 1 -> 2
        shared: 1 -> 3
        shared: 2 3 -> 4
        single: 4 -> 5
        single: 5 -> 6
        shared: 6 -> 7
    """)
    assert (
        found.text()
        == """\
0 shared: 1 -> 2
1 shared: 1 -> 3
barrier
2 shared: 2 3 -> 4
barrier
3 single: 4 -> 5
4 single: 5 -> 6
barrier
5 shared: 6 -> 7"""
    )


def test_no_barrier_within_one_step_of_the_plan_and_none_around_calls():
    found = parsed("""
        shared: 1 -> 2
        +shared: 2 -> 2
        call: 2 -> 3
        shared: 3 -> 4
    """)
    assert "barrier" not in found.text()
    assert found.starts == [0, 0, 2, 3] and not found.waits


def test_a_shared_step_may_run_at_any_time_between_two_barriers():
    found = parsed("""
        shared: 1 -> 2
        shared: 1 -> 3
        single: 1 -> 4
        shared: 2 3 4 -> 5
        single: 5 -> 6
    """)
    alive = lifetimes(found, {2, 3, 4, 5, 6}, {}, [6])
    assert alive.text() == "2: 0-3\n3: 0-3\n4: 2-3\n5: 3-4\n6: 4-5"


def test_written_over_only_what_nobody_else_reads():
    accesses = parsed("""
        shared: 1 -> 2
        shared: 2 -> 3
        shared: 3 -> 4
        shared: 3 4 -> 5
    """)
    origins = [a.origin for a in accesses.accesses]
    over = {origins[1]: [(3, 2)], origins[2]: [(4, 3)], origins[3]: [(5, 3), (5, 4)]}
    assert lifetimes(accesses, {2, 3, 4, 5}, over, [5]).over == [(3, 2), (5, 3), (5, 4)]
