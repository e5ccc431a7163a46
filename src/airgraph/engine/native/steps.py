"""The steps of a frame, as LLVM text: kernels in parallel regions, calls of PyTorch between them.

Steps between two library calls are one parallel region, with a barrier where a step reads what another thread wrote. The
calling thread looks for signals between steps, so that Ctrl-C ends a long call. A thread whose core is taken by another
process holds all others up, for milliseconds; its frame does without other threads for a while after that (`held_up`).
"""

from __future__ import annotations

import platform

from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.cpu import X86_MACHINES
from airgraph.engine.native.tables import RAISED, TORCH_FAILED, ContextWords, FrameWords, ReleaseWords, StepWords

SPINS = 16384  # iterations of waiting before the core is offered to somebody else: a millisecond (x86-64)
NOTICED = 256  # iterations from which on waiting is timed
FINE_CLOCK, COARSE_CLOCK = 1, 6  # Linux's CLOCK_MONOTONIC, and CLOCK_MONOTONIC_COARSE: a few nanoseconds to read
SIGNALS = 100  # milliseconds between two looks at pending signals
LONG_WAIT = 300_000  # nanoseconds, see `held_up`
ALONE = 15  # milliseconds without other threads after such a wait: few enough where it was a thread that slept


def idle(x86_64: bool) -> str:
    """One iteration of waiting, the `spins`-th, for a CPU of this kind: with the instruction that leaves the core to its
    other hardware thread, which may be the one that is waited for, and now and then a call that leaves it to others."""
    declared, pause = (
        ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()")
        if x86_64
        else ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)")
    )
    f = Function("idle", "i64 %spins")
    f.do(pause)
    f.leave(f.test("ne", f.op(f"and i64 %spins, {SPINS - 1}"), 0), lambda: None)
    f.op("call i32 @sched_yield()")
    return f"{declared}\n{f.text()}"


def barrier() -> str:
    """All of `n` threads come here for the k-th time before one goes on: a counter that only grows. (Or none waits any
    more: STOP is set, and every thread leaves at its next step.) How long a thread waited after its first spins is added
    to `waited`."""
    f = Function("barrier", "ptr %counter, i64 %target, ptr %stop, ptr %waited")
    f.do("%since = alloca i64")
    f.set("%since", 0, "0")
    f.do("%old = atomicrmw add ptr %counter, i64 1 acq_rel")
    f.do("br label %wait")
    f.label("wait")
    f.do("%spins = phi i64 [ 0, %entry ], [ %next, %rest ]")
    f.do("%now = load atomic i64, ptr %counter acquire, align 8")
    f.do("%stopped = load atomic i64, ptr %stop monotonic, align 8")
    f.do("%arrived = icmp sge i64 %now, %target")
    f.do("%leave = icmp ne i64 %stopped, 0")
    f.do("%done = or i1 %arrived, %leave")
    f.do("br i1 %done, label %out, label %again")
    f.label("again")
    f.do("%next = add i64 %spins, 1")
    f.when(f.test("eq", "%next", NOTICED), lambda: f.set("%since", 0, f.op("call i64 @nanoseconds()")))
    f.do("br label %rest")
    f.label("rest")
    f.invoke("@idle", ("i64", "%next"))
    f.do("br label %wait")
    f.label("out")
    since = f.word("%since", 0)
    f.leave(f.test("eq", since, 0), lambda: None)
    f.set("%waited", 0, f.add(f.word("%waited", 0), f.sub(f.op("call i64 @nanoseconds()"), since)))
    return f.text()


def milliseconds() -> str:
    f = Function("milliseconds", "", "i64")
    f.do("%time = alloca [2 x i64]")
    f.op(f"call i32 @clock_gettime(i32 {COARSE_CLOCK}, ptr %time)")
    return f.text(f"i64 {f.add(f.mul(f.word('%time', 0), 1000), f.div(f.word('%time', 1), 1_000_000))}")


def nanoseconds() -> str:
    f = Function("nanoseconds", "", "i64")
    f.do("%time = alloca [2 x i64]")
    f.op(f"call i32 @clock_gettime(i32 {FINE_CLOCK}, ptr %time)")
    return f.text(f"i64 {f.add(f.mul(f.word('%time', 0), 1_000_000_000), f.word('%time', 1))}")


def interrupted() -> str:
    """Whether a signal handler raised an exception, which is pending then. Python's lock is taken only now and then, and
    never in a call that is shorter than that."""
    f = Function("interrupted", "ptr %context", "i1")
    now = f.op("call i64 @milliseconds()")
    early = f.test("slt", f.sub(now, f.word("%context", ContextWords.CHECKED)), SIGNALS)
    f.give(early, "i1 false")
    number = f.word(f.word("%context", ContextWords.FRAME, "ptr"), FrameWords.NUMBER)
    f.give(f.test("eq", number, 0), "i1 false")  # nobody would look for the exception
    f.set("%context", ContextWords.CHECKED, now)
    state = f.op("call i32 @PyGILState_Ensure()")
    raised = f.test("ne", f.op("call i32 @PyErr_CheckSignals()"), 0, "i32")
    f.invoke("@PyGILState_Release", ("i32", state))
    return f.text(f"i1 {raised}")


def by_python() -> str:
    """A step that Python does; RAISED, with the exception pending, or 0. What PyTorch left pending when it failed at the
    step before is no exception of this call."""
    f = Function("by_python", "ptr %frame, i64 %step", "i64")
    callback, number = f.word("%frame", FrameWords.CALLBACK, "ptr"), f.word("%frame", FrameWords.NUMBER)
    state = f.op("call i32 @PyGILState_Ensure()")
    f.invoke("@PyErr_Clear")
    given = f"ptr {callback}, ptr @two_numbers, i64 {number}, i64 %step"
    done = f.op(f"call ptr (ptr, ptr, ...) @PyObject_CallFunction({given})")
    fine = f.test("ne", done, "null", "ptr")
    f.when(fine, lambda: f.invoke("@Py_DecRef", ("ptr", done)))
    f.invoke("@PyGILState_Release", ("i32", state))
    return f.text(f"i64 {f.choose(fine, 'i64', '0', str(RAISED))}")


def worker() -> str:
    """One thread's share of the steps [FIRST, LAST) of a context."""
    f = Function("worker", "i64 %from, i64 %to, ptr %context")
    frame = f.word("%context", ContextWords.FRAME, "ptr")
    first, last = f.word("%context", ContextWords.FIRST), f.word("%context", ContextWords.LAST)
    planned = f.word("%context", ContextWords.THREADS)
    whole = f.test("sge", f.sub("%to", "%from"), planned)  # PyTorch gave all shares to this thread
    threads = f.choose(whole, "i64", "1", planned)
    me = f.choose(whole, "i64", "0", "%from")
    table, base = f.word(frame, FrameWords.STEP_TABLE, "ptr"), f.word(frame, FrameWords.BASE, "ptr")
    scratch = f.at(base, f.mul(me, f.word(frame, FrameWords.SCRATCH)), "i8")
    counter, stop = f.at("%context", ContextWords.COUNTER, "i64"), f.at("%context", ContextWords.STOP, "i64")
    several, caller = f.test("sgt", threads, 1), f.test("eq", me, 0)
    f.do("%own = alloca i64")
    f.set("%own", 0, "0")

    def halt() -> None:
        f.when(
            f.op("call i1 @interrupted(ptr %context)"),
            lambda: f.do(f"store atomic i64 1, ptr {stop} monotonic, align 8"),
        )

    def step(i: str, target: str) -> list[str]:
        f.when(caller, halt)
        stopped = f.op(f"load atomic i64, ptr {stop} monotonic, align 8")
        f.leave(f.test("ne", stopped, 0), lambda: None)
        row = f.row(table, i, StepWords.WORDS)
        jobs, unit = f.word(row, StepWords.JOBS), f.word(row, StepWords.UNIT)
        single = f.test("ne", f.word(row, StepWords.SINGLE), 0)
        share = f.mul(f.ceil(f.ceil(jobs, threads), unit), unit)
        share = f.choose(single, "i64", jobs, share)
        begin = f.mul(me, share)
        end = f.min(f.add(begin, share), jobs)
        works = f.test("slt", begin, end)
        function, args, sizes = (f.word(row, n, "ptr") for n in (StepWords.FUNCTION, StepWords.ARGS, StepWords.SIZES))
        f.when(
            works, lambda: f.do(f"call void {function}(ptr {args}, ptr {sizes}, i64 {begin}, i64 {end}, ptr {scratch})")
        )
        due = f.op(f"and i1 {several}, {f.test('ne', f.word(row, StepWords.SYNC), 0)}")
        return f.when(due, lambda: [wait(f, counter, target, threads, stop)], ("i64", target))

    def note() -> None:
        f.set("%context", ContextWords.WAITED, f.word("%own", 0))
        f.set("%context", ContextWords.FINISHED, f.op("call i64 @nanoseconds()"))

    f.loop(first, last, 1, step, ("i64", threads))
    f.when(caller, note)
    return f.text()


def wait(f: Function, counter: str, target: str, threads: str, stop: str) -> str:
    f.invoke("@barrier", ("ptr", counter), ("i64", target), ("ptr", stop), ("ptr", "%own"))
    return f.add(target, threads)


def held_up() -> str:
    """Whether the calling thread waited for others longer than it worked, in a region that began at `start`. The cores are
    busy with something else then, and the thread alone would have been as fast."""
    f = Function("held_up", "ptr %context, i64 %start", "i1")
    now, finished = f.op("call i64 @nanoseconds()"), f.word("%context", ContextWords.FINISHED)
    waited = f.add(f.word("%context", ContextWords.WAITED), f.sub(now, finished))
    worked = f.sub(f.sub(now, "%start"), waited)
    long = f.test("sgt", waited, LONG_WAIT)
    longer = f.test("sgt", waited, worked)
    return f.text(f"i1 {f.op(f'and i1 {long}, {longer}')}")


def others_come(f: Function) -> str:
    """Whether the regions of `%frame` may use several threads now."""
    return f.test("sge", f.op("call i64 @milliseconds()"), f.word("%frame", FrameWords.ALONE_UNTIL))


def started(f: Function) -> str:
    """When a region of several threads begins; it has not waited yet."""
    start = f.op("call i64 @nanoseconds()")
    f.set("%context", ContextWords.WAITED, "0")
    f.set("%context", ContextWords.FINISHED, start)
    return start


def alone_if_held_up(f: Function, start: str) -> None:
    """After the region: its frame does without other threads for a while where they kept the calling one waiting."""
    until = f.add(f.op("call i64 @milliseconds()"), ALONE)
    held = f.op(f"call i1 @held_up(ptr %context, i64 {start})")
    f.when(held, lambda: f.set("%frame", FrameWords.ALONE_UNTIL, until))


def run() -> str:
    """All steps of a frame: calls of the library by themselves, what lies between two of them in one parallel region.

    Returns 0, or what `call` says in place of results.
    """
    f = Function("run", "ptr %frame", "i64", exported=True)
    f.do(f"%context = alloca [{ContextWords.WORDS} x i64]")
    f.set("%context", ContextWords.FRAME, "%frame", "ptr")
    f.set("%context", ContextWords.STOP, "0")
    f.set("%context", ContextWords.CHECKED, f.op("call i64 @milliseconds()"))
    count, table = f.word("%frame", FrameWords.STEPS), f.word("%frame", FrameWords.STEP_TABLE, "ptr")
    threads = f.word("%frame", FrameWords.THREADS)
    f.do("br label %next")
    before = f.block
    f.label("next")
    hole = len(f.lines)
    f.do(f"%more = icmp slt i64 %i, {count}")
    f.do("br i1 %more, label %go, label %end")
    f.label("go")
    row = f.row(table, "%i", StepWords.WORDS)
    after = f.word(row, StepWords.END)
    used_up = f.word(row, StepWords.RELEASE, "ptr")
    f.when(f.test("ne", used_up, "null", "ptr"), lambda: f.invoke("@release", ("ptr", "%frame"), ("ptr", used_up)))
    how = f.word(row, StepWords.CALL)
    cases = f"i64 {StepWords.PYTHON}, label %call  i64 {StepWords.DISPATCHER}, label %dispatch"
    f.do(f"switch i64 {how}, label %region [ {cases} ]")
    f.label("dispatch")
    again = f.op(f"call i64 {f.word('%frame', FrameWords.DISPATCH, 'ptr')}(ptr {f.word(row, StepWords.TAPE, 'ptr')})")
    f.do(f"br i1 {f.test('eq', again, 0)}, label %latch, label %call")
    f.label("call")
    failed = f.op("call i64 @by_python(ptr %frame, i64 %i)")
    f.give(f.test("ne", failed, 0), f"i64 {failed}")
    f.do("br label %latch")
    f.label("region")
    f.set("%context", ContextWords.FIRST, "%i")
    f.set("%context", ContextWords.LAST, after)
    f.set("%context", ContextWords.COUNTER, "0")
    wide = f.op(f"call i1 @wide(ptr {table}, i64 %i, i64 {after})")
    both = f.op(f"and i1 {wide}, {f.test('sgt', threads, 1)}")
    f.do(f"br i1 {f.op(f'and i1 {both}, {others_come(f)}')}, label %many, label %one")
    f.label("many")
    f.set("%context", ContextWords.THREADS, threads)
    start = started(f)
    parallel = f.op(f"call i32 @torch_parallel_for(i64 0, i64 {threads}, i64 1, ptr @worker, ptr %context)")
    f.give(f.test("ne", parallel, 0, "i32"), f"i64 {TORCH_FAILED}")
    alone_if_held_up(f, start)
    f.do("br label %whole")
    f.label("one")
    f.set("%context", ContextWords.THREADS, "1")
    f.invoke("@worker", ("i64", "0"), ("i64", "1"), ("ptr", "%context"))
    f.do("br label %whole")
    f.label("whole")
    f.give(f.test("ne", f.word("%context", ContextWords.STOP), 0), f"i64 {RAISED}")
    f.do("br label %latch")
    f.label("latch")
    f.give(f.op("call i1 @interrupted(ptr %context)"), f"i64 {RAISED}")
    latch = f.block
    f.do("br label %next")
    f.lines[hole:hole] = [f"  %i = phi i64 [ 0, %{before} ], [ {after}, %{latch} ]"]
    f.label("end")
    return f.text("i64 0")


def release() -> str:
    """Lets go of arguments and of results of earlier calls that nothing reads any more (saved tensors, in a backward)."""
    f = Function("release", "ptr %frame, ptr %words")
    arguments, results = f.word("%words", ReleaseWords.ARGUMENTS), f.word("%words", ReleaseWords.RESULTS)

    def drop(i: str) -> None:
        none = f.word("%words", ReleaseWords.NONE, "ptr")
        f.invoke("@Py_IncRef", ("ptr", none))
        index, given = f.word("%words", f.add(i, ReleaseWords.FIRST)), f.word("%frame", FrameWords.LIST, "ptr")
        f.op(f"call i32 @PyList_SetItem(ptr {given}, i64 {index}, ptr {none})")

    def locked() -> None:
        state = f.op("call i32 @PyGILState_Ensure()")
        f.loop("0", arguments, 1, drop)
        f.invoke("@PyGILState_Release", ("i32", state))

    def forget(i: str) -> None:
        handles = f.word("%words", f.add(f.add(i, ReleaseWords.FIRST), arguments), "ptr")
        f.invoke(f.word("%frame", FrameWords.LET_GO, "ptr"), ("ptr", handles), ("i64", "2"))

    f.when(f.test("ne", arguments, 0), locked)
    f.loop("0", results, 1, forget)
    return f.text()


def wide() -> str:
    """Whether one of these steps is worth more than one thread."""
    f = Function("wide", "ptr %table, i64 %first, i64 %last", "i1")
    (found,) = f.loop(
        "%first",
        "%last",
        1,
        lambda i, seen: [
            f.op(f"or i1 {seen}, {f.test('eq', f.word(f.row('%table', i, StepWords.WORDS), StepWords.SINGLE), 0)}")
        ],
        ("i1", "false"),
    )
    return f.text(f"i1 {found}")


def source() -> str:
    """For this machine, whatever is built in this process."""
    parts = (milliseconds, nanoseconds, interrupted, by_python, barrier, worker, held_up, release, wide, run)
    return "\n".join([idle(platform.machine().lower() in X86_MACHINES), *(part() for part in parts)])
