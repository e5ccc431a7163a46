"""The threads of an instance, as LLVM text: they wait for parallel regions, and each does its share of the steps.

    pool = pool_new(threads)                null where no second thread can be started
    pool_run(pool, context)                 worker(i, i + 1, context) in every thread i, the calling one being thread 0
    pool_free(pool)

A thread spins for a while before it sleeps: a region of a small model is over in less time than waking a thread takes.
"""

from __future__ import annotations

from airgraph.deploy.words import ThreadPoolWords as Words
from airgraph.engine.native.llvm.builder import Function

PATIENCE = 8192  # iterations that a thread spins before it sleeps: some tenths of a millisecond

DECLARES = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_mutex_destroy(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @pthread_cond_destroy(ptr)
"""


def now(f: Function, pool: str, word: int) -> str:
    return f.op(f"load atomic i64, ptr {f.at(pool, word, 'i64')} seq_cst, align 8")


def advance(f: Function, pool: str, word: int, by: int = 1) -> None:
    f.op(f"atomicrmw add ptr {f.at(pool, word, 'i64')}, i64 {by} seq_cst")


def pool_wait() -> str:
    """Until there is a region after number `seen`: its number."""
    f = Function("pool_wait", "ptr %pool, i64 %seen", "i64")
    f.do("br label %spin")
    f.label("spin")
    f.do("%spins = phi i64 [ 0, %entry ], [ %next, %again ]")
    found = now(f, "%pool", Words.GENERATION)
    f.give(f.test("ne", found, "%seen"), f"i64 {found}")
    f.do("br label %again")
    f.label("again")
    f.do("%next = add i64 %spins, 1")
    f.invoke("@idle", ("i64", "%next"))
    f.do(f"br i1 {f.test('slt', '%next', PATIENCE)}, label %spin, label %sleep")
    f.label("sleep")
    mutex, condition = (f.at("%pool", n, "i64") for n in (Words.MUTEX, Words.CONDITION))
    f.op(f"call i32 @pthread_mutex_lock(ptr {mutex})")
    advance(f, "%pool", Words.SLEEPING)
    f.do("br label %look")
    f.label("look")
    found = now(f, "%pool", Words.GENERATION)
    f.do(f"br i1 {f.test('ne', found, '%seen')}, label %awake, label %rest")
    f.label("rest")
    f.op(f"call i32 @pthread_cond_wait(ptr {condition}, ptr {mutex})")
    f.do("br label %look")
    f.label("awake")
    advance(f, "%pool", Words.SLEEPING, -1)
    f.op(f"call i32 @pthread_mutex_unlock(ptr {mutex})")
    return f.text(f"i64 {found}")


def pool_thread() -> str:
    """What a thread does all its life. It is given its own entry among the pool's handles: its number and the pool."""
    f = Function("pool_thread", "ptr %mine", "ptr")
    pool, number = f.word("%mine", 1, "ptr"), f.word("%mine", 2)
    end = f.add(number, 1)
    f.do("br label %wait")
    f.label("wait")
    f.do("%seen = phi i64 [ 0, %entry ], [ %now, %work ]")
    f.do(f"%now = call i64 @pool_wait(ptr {pool}, i64 %seen)")
    stop = f.test("ne", now(f, pool, Words.STOP), 0)
    f.do(f"br i1 {stop}, label %out, label %work")
    f.label("work")
    f.invoke("@worker", ("i64", number), ("i64", end), ("ptr", f.word(pool, Words.CONTEXT, "ptr")))
    advance(f, pool, Words.DONE)
    f.do("br label %wait")
    f.label("out")
    return f.text("ptr null")


def pool_announce() -> str:
    """A new region, for those who spin and those who sleep."""
    f = Function("pool_announce", "ptr %pool")
    advance(f, "%pool", Words.GENERATION)
    mutex, condition = (f.at("%pool", n, "i64") for n in (Words.MUTEX, Words.CONDITION))

    def wake() -> None:
        f.op(f"call i32 @pthread_mutex_lock(ptr {mutex})")
        f.op(f"call i32 @pthread_cond_broadcast(ptr {condition})")
        f.op(f"call i32 @pthread_mutex_unlock(ptr {mutex})")

    f.when(f.test("ne", now(f, "%pool", Words.SLEEPING), 0), wake)
    return f.text()


def pool_run() -> str:
    f = Function("pool_run", "ptr %pool, ptr %context")
    f.set("%pool", Words.CONTEXT, "%context", "ptr")
    f.set("%pool", Words.DONE, "0")
    f.invoke("@pool_announce", ("ptr", "%pool"))
    f.invoke("@worker", ("i64", "0"), ("i64", "1"), ("ptr", "%context"))
    others = f.word("%pool", Words.COUNT)
    f.do("br label %wait")
    f.label("wait")
    f.do("%spins = phi i64 [ 0, %entry ], [ %next, %again ]")
    finished = f.test("sge", now(f, "%pool", Words.DONE), others)
    f.leave(finished, lambda: None)
    f.do("br label %again")
    f.label("again")
    f.do("%next = add i64 %spins, 1")
    f.invoke("@idle", ("i64", "%next"))
    f.do("br label %wait")
    return "\n".join([f.head, *f.lines, "}", ""])


HANDLE = 4  # words for each thread: its handle, the pool, its number


def pool_new() -> str:
    """With one thread fewer than `threads`: the caller is one of them. COUNT says how many there came to be."""
    f = Function("pool_new", "i64 %threads", "ptr")
    count = f.sub("%threads", 1)
    size = f.add(f.mul(count, HANDLE), Words.HANDLES)
    pool = f.op(f"call ptr @calloc(i64 {size}, i64 8)")
    f.give(f.test("eq", pool, "null", "ptr"), "ptr null")
    f.op(f"call i32 @pthread_mutex_init(ptr {f.at(pool, Words.MUTEX, 'i64')}, ptr null)")
    f.op(f"call i32 @pthread_cond_init(ptr {f.at(pool, Words.CONDITION, 'i64')}, ptr null)")
    table = f.at(pool, Words.HANDLES, "i64")

    def start(i: str) -> None:
        mine = f.row(table, i, HANDLE)
        f.set(mine, 1, pool, "ptr")
        f.set(mine, 2, f.add(i, 1))
        failed = f.op(f"call i32 @pthread_create(ptr {mine}, ptr null, ptr @pool_thread, ptr {mine})")
        f.give(f.test("ne", failed, 0, "i32"), f"ptr {pool}")
        f.set(pool, Words.COUNT, f.add(i, 1))

    f.loop("0", count, 1, start)
    return f.text(f"ptr {pool}")


def pool_free() -> str:
    f = Function("pool_free", "ptr %pool")
    f.leave(f.test("eq", "%pool", "null", "ptr"), lambda: None)
    f.do(f"store atomic i64 1, ptr {f.at('%pool', Words.STOP, 'i64')} seq_cst, align 8")
    f.invoke("@pool_announce", ("ptr", "%pool"))
    table = f.at("%pool", Words.HANDLES, "i64")
    f.loop(
        "0",
        f.word("%pool", Words.COUNT),
        1,
        lambda i: f.op(f"call i32 @pthread_join(i64 {f.word(f.row(table, i, HANDLE), 0)}, ptr null)") and None,
    )
    f.op(f"call i32 @pthread_cond_destroy(ptr {f.at('%pool', Words.CONDITION, 'i64')})")
    f.op(f"call i32 @pthread_mutex_destroy(ptr {f.at('%pool', Words.MUTEX, 'i64')})")
    f.invoke("@free", ("ptr", "%pool"))
    return f.text()


def source() -> str:
    parts = (pool_wait, pool_thread, pool_announce, pool_run, pool_new, pool_free)
    return "\n".join([DECLARES, *(part() for part in parts)])
