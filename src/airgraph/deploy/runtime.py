"""The C interface of a built program, as LLVM text: what the header (interface.py) declares, without Python and PyTorch.

    create ─ map the weights, check that they are this program's, copy the frame and fill in its addresses, start threads
    prepare ─ the sizes of the inputs → the sizes of the outputs, and how much memory the intermediates need
    run ─ bind the frame to the sizes if they changed, note where inputs and outputs are, run the steps

A frame is the one of the native engine (engine/native/tables.py), and so are the interpreter of sizes and the steps. An
instance has one frame; a mutex makes calls of the same instance wait for each other. Every function returns null, or
a text that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from airgraph.deploy import pool
from airgraph.deploy.text import Constants
from airgraph.deploy.words import (
    MESSAGE_BYTES,
    GuardWords,
    InstanceWords,
    PortWords,
    RangeWords,
    TensorWords,
    WeightWords,
)
from airgraph.engine.native import binding, steps
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.llvm.cpu import is_x86_64
from airgraph.engine.native.llvm.numbers import BAD_NUMBER, ZERO_DIVISOR
from airgraph.engine.native.runtime import place_intermediates
from airgraph.engine.native.tables import ContextWords, DefinitionWords, EntryWords, FrameWords

ALIGNED = 64  # bytes, of the memory for intermediates
READ, PRIVATE, END = 1, 2, 2  # PROT_READ, MAP_PRIVATE, SEEK_END
CORES = 84  # _SC_NPROCESSORS_ONLN of glibc and musl
DECLARES = """
declare ptr @calloc(i64, i64)
declare void @free(ptr)
declare i32 @posix_memalign(ptr, i64, i64)
declare i32 @open(ptr, i32, ...)
declare i32 @close(i32)
declare i64 @lseek(i32, i64, i32)
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @munmap(ptr, i64)
declare i64 @sysconf(i32)
declare i32 @sched_yield()
declare i32 @clock_gettime(i32, ptr)
declare i32 @snprintf(ptr, i64, ptr, ...)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""


class RuntimeWriter:
    """The functions for a program of so many inputs, outputs and so on; `name` is the prefix of those that C calls."""

    def __init__(self, name: str, constants: Constants, counts: dict[str, int], identity: list[int]) -> None:
        """`counts`: the rows of each table; `identity`: the first words of the weights, which must be these."""
        self.name, self.constants, self.counts, self.identity = name, constants, counts, identity

    # -- messages -----------------------------------------------------------------------------------------------------
    def fail(self, f: Function, condition: str, text: str) -> None:
        f.give(condition, f"ptr {self.constants.string(text)}")

    def tell(self, f: Function, condition: str, text: str, values: Callable[[], str]) -> None:
        """As `fail`, with values in the text: it is written to the instance."""
        inside, on = f.name("tell"), f.name("on")
        f.do(f"br i1 {condition}, label %{inside}, label %{on}")
        f.label(inside)
        place = f.at("%instance", InstanceWords.MESSAGE, "i64")
        given = f"ptr {place}, i64 {MESSAGE_BYTES}, ptr {self.constants.string(text)}, {values()}"
        f.op(f"call i32 (ptr, i64, ptr, ...) @snprintf({given})")
        f.do(f"ret ptr {place}")
        f.label(on)

    # -- create and destroy -------------------------------------------------------------------------------------------
    def create(self) -> str:
        f = Function("create", "ptr %weights, i64 %bytes, i64 %mapped, i32 %wanted, ptr %out", "ptr")
        short = f.test("slt", "%bytes", 8 * len(self.identity))
        self.fail(f, f.op(f"or i1 {short}, {f.test('eq', '%weights', 'null', 'ptr')}"), "the weights are truncated")
        rest = f.op(f"and i64 {f.op('ptrtoint ptr %weights to i64')}, 7")
        self.fail(f, f.test("ne", rest, 0), "the weights are not aligned to 8 bytes")
        for i, word in enumerate(self.identity[:-1]):
            text = "these are not weights of airgraph's" if i == 0 else "these weights are of another model"
            self.fail(f, f.test("ne", f.word("%weights", i), word), text)
        self.fail(f, f.test("slt", "%bytes", self.identity[-1]), "the weights are truncated")
        instance = f.op(f"call ptr @calloc(i64 {InstanceWords.WORDS}, i64 8)")
        frame = f.op(f"call ptr @calloc(i64 {self.counts['words']}, i64 8)")
        state = f.op(f"call ptr @calloc(i64 {max(self.counts['state'], 1)}, i64 1)")
        for p in (instance, frame, state):
            self.fail(f, f.test("eq", p, "null", "ptr"), "out of memory")
        for word, value in (
            (InstanceWords.FRAME, frame),
            (InstanceWords.STATE, state),
            (InstanceWords.OWN_STATE, state),
            (InstanceWords.WEIGHTS, "%weights"),
        ):
            f.set(instance, word, value, "ptr")
        f.set(instance, InstanceWords.MAPPED, "%mapped")
        self.connect(f, frame, state)
        f.op(f"call i32 @pthread_mutex_init(ptr {f.at(instance, InstanceWords.MUTEX, 'i64')}, ptr null)")
        threads = self.start_threads(f, instance)
        f.set(instance, InstanceWords.THREADS, threads)
        f.set(frame, FrameWords.THREADS, threads)
        f.set(f.word(frame, FrameWords.VALUES, "ptr"), 0, threads)
        f.set("%out", 0, instance, "ptr")
        return f.text("ptr null")

    def connect(self, f: Function, frame: str, state: str) -> None:
        """The frame: words, addresses of its own words, of functions, and of weights."""
        f.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {frame}, ptr @words, i64 {8 * self.counts['words']}, i1 false)")

        def link(i: str) -> None:
            row = f.row("@links", i, 2)
            f.set(frame, f.word(row, 0), f.at(frame, f.word(row, 1), "i64"), "ptr")

        def function(i: str) -> None:
            row = f.row("@functions", i, 2)
            f.set(frame, f.word(row, 0), f.word(row, 1, "ptr"), "ptr")

        def weight(i: str) -> None:
            row = f.row("@weights", i, WeightWords.WORDS)
            start, place = f.at("%weights", f.word(row, WeightWords.OFFSET), "i8"), f.word(row, WeightWords.STATE)
            own = f.at(state, place, "i8")
            kept = f.test("sge", place, 0)
            size = f.word(row, WeightWords.BYTES)
            f.when(
                kept, lambda: f.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {own}, ptr {start}, i64 {size}, i1 false)")
            )
            f.set(frame, f.word(row, WeightWords.AT), f.choose(kept, "ptr", own, start), "ptr")

        for name, one in (("links", link), ("functions", function), ("weights", weight)):
            f.loop("0", str(self.counts[name]), 1, one)

    def start_threads(self, f: Function, instance: str) -> str:
        given = f.op("sext i32 %wanted to i64")
        cores = f.either(f.test("slt", given, 1), "i64", lambda: f.op(f"call i64 @sysconf(i32 {CORES})"), given)
        threads = f.max(cores, 1)
        several = f.test("sgt", threads, 1)
        made = f.either(several, "ptr", lambda: f.op(f"call ptr @pool_new(i64 {threads})"), "null")
        f.set(instance, InstanceWords.POOL, made, "ptr")
        present = f.test("ne", made, "null", "ptr")
        return f.either(present, "i64", lambda: f.add(f.word(made, pool.Words.COUNT), 1), "1")

    def create_from_memory(self) -> str:
        f = Function(f"{self.name}_create_from_memory", "ptr %weights, i64 %bytes, i32 %threads, ptr %out", "ptr", True)
        f.set("%out", 0, "null", "ptr")
        given = "ptr %weights, i64 %bytes, i64 0, i32 %threads, ptr %out"
        return f.text(f"ptr {f.op(f'call ptr @create({given})')}")

    def create_from_file(self) -> str:
        f = Function(f"{self.name}_create", "ptr %path, i32 %threads, ptr %out", "ptr", exported=True)
        f.set("%out", 0, "null", "ptr")
        file = f.op("call i32 (ptr, i32, ...) @open(ptr %path, i32 0)")
        self.fail(f, f.test("slt", file, 0, "i32"), "the file of weights cannot be opened")
        size = f.op(f"call i64 @lseek(i32 {file}, i64 0, i32 {END})")
        length = f.max(size, 1)
        memory = f.op(f"call ptr @mmap(ptr null, i64 {length}, i32 {READ}, i32 {PRIVATE}, i32 {file}, i64 0)")
        f.op(f"call i32 @close(i32 {file})")
        failed = f.test("eq", f.op(f"ptrtoint ptr {memory} to i64"), -1)
        self.fail(f, failed, "the file of weights cannot be mapped")
        given = f"ptr {memory}, i64 {size}, i64 {length}, i32 %threads, ptr %out"
        error = f.op(f"call ptr @create({given})")
        f.when(
            f.test("ne", error, "null", "ptr"), lambda: f.op(f"call i32 @munmap(ptr {memory}, i64 {length})") and None
        )
        return f.text(f"ptr {error}")

    def destroy(self) -> str:
        f = Function(f"{self.name}_destroy", "ptr %instance", exported=True)
        f.leave(f.test("eq", "%instance", "null", "ptr"), lambda: None)
        f.invoke("@pool_free", ("ptr", f.word("%instance", InstanceWords.POOL, "ptr")))
        f.op(f"call i32 @pthread_mutex_destroy(ptr {f.at('%instance', InstanceWords.MUTEX, 'i64')})")
        mapped, weights = f.word("%instance", InstanceWords.MAPPED), f.word("%instance", InstanceWords.WEIGHTS, "ptr")
        f.when(f.test("ne", mapped, 0), lambda: f.op(f"call i32 @munmap(ptr {weights}, i64 {mapped})") and None)
        for word in (InstanceWords.FRAME, InstanceWords.OWN_STATE, InstanceWords.BLOCK):
            f.invoke("@free", ("ptr", f.word("%instance", word, "ptr")))
        f.invoke("@free", ("ptr", "%instance"))
        return f.text()

    def share(self) -> str:
        """The state of another instance, of this program or of one that was built with it, instead of the own copy."""
        f = Function("share", "ptr %instance, ptr %other", "ptr")
        self.fail(f, f.test("eq", "%other", "null", "ptr"), "there is no instance to share with")
        for i, word in enumerate(self.identity):
            found = f.word(f.word("%other", InstanceWords.WEIGHTS, "ptr"), i)
            self.fail(f, f.test("ne", found, word), "the other instance is of another model")
        f.give(f.test("eq", "%other", "%instance", "ptr"), "ptr null")
        frame, state = f.word("%instance", InstanceWords.FRAME, "ptr"), f.word("%other", InstanceWords.STATE, "ptr")

        def weight(i: str) -> None:
            row = f.row("@weights", i, WeightWords.WORDS)
            place = f.word(row, WeightWords.STATE)
            at, shared = f.word(row, WeightWords.AT), f.at(state, place, "i8")
            f.when(f.test("sge", place, 0), lambda: f.set(frame, at, shared, "ptr"))

        f.loop("0", str(self.counts["weights"]), 1, weight)
        f.invoke("@free", ("ptr", f.word("%instance", InstanceWords.OWN_STATE, "ptr")))
        f.set("%instance", InstanceWords.OWN_STATE, "null", "ptr")
        f.set("%instance", InstanceWords.STATE, state, "ptr")
        return f.text("ptr null")

    # -- sizes --------------------------------------------------------------------------------------------------------
    def size_in_bytes(self) -> str:
        """Of a contiguous tensor; -1 where that is no number, or a size is negative."""
        f = Function("size_in_bytes", "ptr %sizes, i64 %rank, i64 %item", "i64")

        def one(d: str, total: str) -> list[str]:
            size = f.word("%sizes", d)
            f.give(f.test("slt", size, 0), "i64 -1")
            pair = f.op(f"call {{i64, i1}} @llvm.smul.with.overflow.i64(i64 {total}, i64 {size})")
            f.give(f.op(f"extractvalue {{i64, i1}} {pair}, 1"), "i64 -1")
            return [f.op(f"extractvalue {{i64, i1}} {pair}, 0")]

        (total,) = f.loop("0", "%rank", 1, one, ("i64", "%item"))
        return f.text(f"i64 {total}")

    def fit(self) -> str:
        """The frame for the sizes of these inputs; what does not fit is told."""
        f = Function("fit", "ptr %instance, ptr %inputs", "ptr")
        frame = f.word("%instance", InstanceWords.FRAME, "ptr")
        values, table = f.word(frame, FrameWords.VALUES, "ptr"), f.word(frame, FrameWords.ARG_TABLE, "ptr")
        inputs = str(self.counts["inputs"])
        f.loop("0", inputs, 1, lambda i: self.check_kind(f, table, i))
        f.loop("0", str(self.counts["definitions"]), 1, lambda i: self.define(f, values, i))
        f.loop("0", str(self.counts["ranges"]), 1, lambda i: self.check_range(f, values, i))
        stale = f.test("eq", f.word("%instance", InstanceWords.BOUND), 0)
        f.when(stale, lambda: self.bind(f, frame, values))
        f.loop("0", inputs, 1, lambda i: self.check_sizes(f, table, i))
        return f.text("ptr null")

    def port(self, f: Function, ports: str, table: str, tensors: str, i: str) -> tuple[str, str, str]:
        """(its row among the inputs or outputs, its entry in the frame, the caller's tensor)"""
        row = f.row(ports, i, PortWords.WORDS)
        return row, f.row(table, f.word(row, PortWords.ENTRY), EntryWords.WORDS), f.row(tensors, i, TensorWords.WORDS)

    def check_kind(self, f: Function, table: str, i: str) -> None:
        row, entry, tensor = self.port(f, "@inputs", table, "%inputs", i)
        name = f.word(row, PortWords.NAME, "ptr")
        for what, word, wanted in (
            ("dtype", TensorWords.DTYPE, f.word(row, PortWords.DTYPE)),
            ("rank", TensorWords.RANK, f.word(entry, EntryWords.DIM)),
        ):
            given = f.word(tensor, word)
            text = f"input %lld (%s) has {what} %lld, and the model takes %lld"
            values = f"i64 {i}, ptr {name}, i64 {given}, i64 {wanted}"
            self.tell(f, f.test("ne", given, wanted), text, lambda values=values: values)  # type: ignore[misc]

    def define(self, f: Function, values: str, i: str) -> None:
        """A symbol, from the size of an input or from a number."""
        row = f.row("@definitions", i, DefinitionWords.WORDS)
        tensor = f.row("%inputs", f.word(row, DefinitionWords.ARGUMENT), TensorWords.WORDS)
        is_number = f.test("eq", f.word(row, DefinitionWords.KIND), DefinitionWords.NUMBER)
        data = f.word(tensor, TensorWords.DATA, "ptr")
        present = f.op(f"and i1 {is_number}, {f.test('ne', data, 'null', 'ptr')}")
        size = f.word(f.at(tensor, TensorWords.SIZES, "i64"), f.word(row, DefinitionWords.AXIS))
        found = f.either(present, "i64", lambda: f.word(data, 0), size)
        multiple = f.op(f"sub i64 {found}, {f.word(row, DefinitionWords.OFFSET)}")
        value = f.op(f"sdiv i64 {multiple}, {f.word(row, DefinitionWords.FACTOR)}")
        symbol = f.word(row, DefinitionWords.SYMBOL)
        changed = f.test("ne", value, f.word(values, symbol))
        f.when(changed, lambda: f.set("%instance", InstanceWords.BOUND, "0"))
        f.set(values, symbol, value)

    def check_range(self, f: Function, values: str, i: str) -> None:
        row = f.row("@ranges", i, RangeWords.WORDS)
        value, low, high = f.word(values, f.word(row, RangeWords.SYMBOL)), *(f.word(row, n) for n in (1, 2))
        outside = f.op(f"or i1 {f.test('slt', value, low)}, {f.test('sgt', value, high)}")
        text = "%s is %lld, and the model takes %lld to %lld"
        name = f.word(row, RangeWords.NAME, "ptr")
        self.tell(f, outside, text, lambda: f"ptr {name}, i64 {value}, i64 {low}, i64 {high}")

    def bind(self, f: Function, frame: str, values: str) -> None:
        code = f"ptr @code, i64 {self.counts['code']}, ptr {values}, i64 {self.counts['symbols']}, ptr @questions"
        failed = f.op(f"call i64 @evaluate({code})")
        self.fail(f, f.test("ne", failed, 0), "the sizes are too large")

        def guard(i: str) -> None:
            row = f.row("@guards", i, GuardWords.WORDS)
            broken = f.test("eq", f.word(values, f.word(row, GuardWords.VALUE)), 0)
            self.tell(f, broken, "the model takes sizes with %s", lambda: f"ptr {f.word(row, GuardWords.TEXT, 'ptr')}")

        f.loop("0", str(self.counts["guards"]), 1, guard)
        f.invoke("@write", ("ptr", frame))
        f.set("%instance", InstanceWords.BOUND, "1")

    def check_sizes(self, f: Function, table: str, i: str) -> None:
        row, entry, tensor = self.port(f, "@inputs", table, "%inputs", i)
        name, rank = f.word(row, PortWords.NAME, "ptr"), f.word(entry, EntryWords.DIM)
        sizes, wanted = f.at(tensor, TensorWords.SIZES, "i64"), f.word(entry, EntryWords.SIZES, "ptr")

        def one(d: str) -> None:
            given, right = f.word(sizes, d), f.word(wanted, d)
            text = "input %lld (%s) has size %lld in dimension %lld, and the model takes %lld"
            values = f"i64 {i}, ptr {name}, i64 {given}, i64 {d}, i64 {right}"
            self.tell(f, f.test("ne", given, right), text, lambda: values)

        f.loop("0", rank, 1, one)
        self.check_memory(f, row, tensor, sizes, rank, "input", i)
        number = f.test("eq", f.word(entry, EntryWords.KIND), EntryWords.WHOLE)
        f.when(number, lambda: self.check_number(f, entry, tensor, name, i))

    def check_number(self, f: Function, entry: str, tensor: str, name: str, i: str) -> None:
        given, wanted = f.word(f.word(tensor, TensorWords.DATA, "ptr"), 0), f.word(entry, EntryWords.VALUE)
        text = "input %lld (%s) is %lld, and the model takes %lld"
        self.tell(f, f.test("ne", given, wanted), text, lambda: f"i64 {i}, ptr {name}, i64 {given}, i64 {wanted}")

    def check_memory(self, f: Function, row: str, tensor: str, sizes: str, rank: str, what: str, i: str) -> None:
        name, item = f.word(row, PortWords.NAME, "ptr"), f.word(row, PortWords.ITEM)
        need = f.op(f"call i64 @size_in_bytes(ptr {sizes}, i64 {rank}, i64 {item})")
        self.fail(f, f.test("slt", need, 0), "the sizes are too large")
        bytes, data = f.word(tensor, TensorWords.BYTES), f.word(tensor, TensorWords.DATA, "ptr")
        text = f"{what} %lld (%s) has %lld bytes, and needs %lld"
        self.tell(f, f.test("slt", bytes, need), text, lambda: f"i64 {i}, ptr {name}, i64 {bytes}, i64 {need}")
        bare = f.op(f"and i1 {f.test('eq', data, 'null', 'ptr')}, {f.test('ne', need, 0)}")
        self.tell(f, bare, f"{what} %lld (%s) has no memory", lambda: f"i64 {i}, ptr {name}")

    # -- prepare and run ----------------------------------------------------------------------------------------------
    def describe(self) -> str:
        """The caller's outputs: element types and sizes for the sizes at hand, and with `bytes` what they need."""
        f = Function("describe", "ptr %instance, ptr %outputs, i1 %bytes", "void")
        frame = f.word("%instance", InstanceWords.FRAME, "ptr")
        table = f.word(frame, FrameWords.OUT_TABLE, "ptr")

        def one(i: str) -> None:
            row, entry, tensor = self.port(f, "@outputs", table, "%outputs", i)
            rank, wanted = f.word(entry, EntryWords.DIM), f.word(entry, EntryWords.SIZES, "ptr")
            sizes = f.at(tensor, TensorWords.SIZES, "i64")
            f.set(tensor, TensorWords.DTYPE, f.word(row, PortWords.DTYPE))
            f.set(tensor, TensorWords.RANK, rank)
            f.loop("0", rank, 1, lambda d: f.set(sizes, d, f.word(wanted, d)))
            given = f"ptr {sizes}, i64 {rank}, i64 {f.word(row, PortWords.ITEM)}"
            f.when("%bytes", lambda: f.set(tensor, TensorWords.BYTES, f.op(f"call i64 @size_in_bytes({given})")))

        f.loop("0", str(self.counts["outputs"]), 1, one)
        return f.text()

    def prepare(self) -> str:
        f = Function("prepare", "ptr %instance, ptr %inputs, ptr %outputs, ptr %arena", "ptr")
        error = f.op("call ptr @fit(ptr %instance, ptr %inputs)")
        f.give(f.test("ne", error, "null", "ptr"), f"ptr {error}")
        f.invoke("@describe", ("ptr", "%instance"), ("ptr", "%outputs"), ("i1", "true"))
        need = f.word(f.word("%instance", InstanceWords.FRAME, "ptr"), FrameWords.NEED)
        present = f.test("ne", "%arena", "null", "ptr")
        f.when(present, lambda: f.set("%arena", 0, f.add(need, ALIGNED)))
        return f.text("ptr null")

    def memory(self) -> str:
        """Where intermediates lie: in the caller's memory, or in the instance's own."""
        f = Function("memory", "ptr %instance, ptr %arena, i64 %bytes", "ptr")
        frame = f.word("%instance", InstanceWords.FRAME, "ptr")
        need = f.add(f.word(frame, FrameWords.NEED), ALIGNED)
        given = f.test("ne", "%arena", "null", "ptr")
        short = f.op(f"and i1 {given}, {f.test('slt', '%bytes', need)}")
        text = "the arena has %lld bytes, and the model needs %lld at these sizes"
        self.tell(f, short, text, lambda: f"i64 %bytes, i64 {need}")
        small = f.test("slt", f.word("%instance", InstanceWords.BLOCK_BYTES), need)
        grows = f.op(f"and i1 {f.op(f'xor i1 {given}, true')}, {small}")
        place = f.at("%instance", InstanceWords.BLOCK, "i64")

        def grow() -> None:
            f.invoke("@free", ("ptr", f.word(place, 0, "ptr")))
            f.set(place, 0, "null", "ptr")
            f.set("%instance", InstanceWords.BLOCK_BYTES, "0")
            failed = f.op(f"call i32 @posix_memalign(ptr {place}, i64 {ALIGNED}, i64 {need})")
            self.fail(f, f.test("ne", failed, 0, "i32"), "out of memory")
            f.set("%instance", InstanceWords.BLOCK_BYTES, need)

        f.when(grows, grow)
        base = f.choose(given, "ptr", "%arena", f.word(place, 0, "ptr"))
        start = f.op(f"ptrtoint ptr {base} to i64")
        f.set(frame, FrameWords.BASE, f.down(f.add(start, ALIGNED - 1), ALIGNED))
        return f.text("ptr null")

    def run(self) -> str:
        f = Function("run", "ptr %instance, ptr %inputs, ptr %outputs, ptr %arena, i64 %bytes", "ptr")
        frame = f.word("%instance", InstanceWords.FRAME, "ptr")
        for call in ("@fit(ptr %instance, ptr %inputs)", "@memory(ptr %instance, ptr %arena, i64 %bytes)"):
            error = f.op(f"call ptr {call}")
            f.give(f.test("ne", error, "null", "ptr"), f"ptr {error}")
        f.invoke("@describe", ("ptr", "%instance"), ("ptr", "%outputs"), ("i1", "false"))
        slots = f.word(frame, FrameWords.SLOTS, "ptr")
        arguments, outs = (f.word(frame, n, "ptr") for n in (FrameWords.ARG_TABLE, FrameWords.OUT_TABLE))
        f.loop("0", str(self.counts["inputs"]), 1, lambda i: self.take_input(f, arguments, slots, i))
        f.loop("0", str(self.counts["outputs"]), 1, lambda i: self.take_output(f, outs, slots, i))
        place_intermediates(f, frame)
        self.run_steps(f, frame)
        return f.text("ptr null")

    def take_input(self, f: Function, table: str, slots: str, i: str) -> None:
        _, entry, tensor = self.port(f, "@inputs", table, "%inputs", i)
        kind, slot = f.word(entry, EntryWords.KIND), f.word(entry, EntryWords.VALUE)
        data = f.word(tensor, TensorWords.DATA, "ptr")
        f.when(f.test("eq", kind, EntryWords.FLOAT), lambda: f.set(f.word(slots, slot, "ptr"), 0, f.word(data, 0)))
        f.when(f.test("eq", kind, EntryWords.TENSOR), lambda: f.set(slots, slot, data, "ptr"))

    def take_output(self, f: Function, table: str, slots: str, i: str) -> None:
        row, entry, tensor = self.port(f, "@outputs", table, "%outputs", i)
        sizes, rank = f.at(tensor, TensorWords.SIZES, "i64"), f.word(entry, EntryWords.DIM)
        self.check_memory(f, row, tensor, sizes, rank, "output", i)
        f.set(slots, f.word(entry, EntryWords.VALUE), f.word(tensor, TensorWords.DATA, "ptr"), "ptr")

    def run_steps(self, f: Function, frame: str) -> None:
        errors, amount = f.word(frame, FrameWords.ERROR_TABLE, "ptr"), f.word(frame, FrameWords.ERRORS)
        f.loop("0", amount, 1, lambda i: f.set(f.word(errors, i, "ptr"), 0, "0"))
        f.invoke("@run_all", ("ptr", frame), ("ptr", f.word("%instance", InstanceWords.POOL, "ptr")))
        (bad,) = f.loop(
            "0",
            amount,
            1,
            lambda i, seen: [f.op(f"or i64 {seen}, {f.word(f.word(errors, i, 'ptr'), 0)}")],
            ("i64", "0"),
        )
        self.fail(f, f.bit(bad, BAD_NUMBER), "an index is out of range")
        self.fail(f, f.bit(bad, ZERO_DIVISOR), "a whole number is divided by zero")

    def run_all(self) -> str:
        """All steps, in one parallel region where one of them is worth more than one thread."""
        f = Function("run_all", "ptr %frame, ptr %pool")
        f.do(f"%context = alloca [{ContextWords.WORDS} x i64], align 64")
        count, table = f.word("%frame", FrameWords.STEPS), f.word("%frame", FrameWords.STEP_TABLE, "ptr")
        f.set("%context", ContextWords.FRAME, "%frame", "ptr")
        for word, value in (
            (ContextWords.FIRST, "0"),
            (ContextWords.LAST, count),
            (ContextWords.STOP, "0"),
            (ContextWords.COUNTER, "0"),
        ):
            f.set("%context", word, value)
        wide = f.op(f"call i1 @wide(ptr {table}, i64 0, i64 {count})")
        several = f.op(f"and i1 {wide}, {f.test('ne', '%pool', 'null', 'ptr')}")
        several = f.op(f"and i1 {several}, {steps.others_come(f)}")
        threads = f.choose(several, "i64", f.word("%frame", FrameWords.THREADS), "1")
        f.set("%context", ContextWords.THREADS, threads)

        def together() -> None:
            start = steps.started(f)
            f.invoke("@pool_run", ("ptr", "%pool"), ("ptr", "%context"))
            steps.alone_if_held_up(f, start)

        f.leave(several, together)
        f.invoke("@worker", ("i64", "0"), ("i64", "1"), ("ptr", "%context"))
        return f.text()

    def locked(self, function: str, params: str) -> str:
        """What C calls: the function of that name, while no other thread is in the same instance."""
        f = Function(f"{self.name}_{function}", params, "ptr", exported=True)
        mutex = f.at("%instance", InstanceWords.MUTEX, "i64")
        f.op(f"call i32 @pthread_mutex_lock(ptr {mutex})")
        error = f.op(f"call ptr @{function}({params})")
        f.op(f"call i32 @pthread_mutex_unlock(ptr {mutex})")
        return f.text(f"ptr {error}")

    def threads(self) -> str:
        f = Function(f"{self.name}_threads", "ptr %instance", "i32", exported=True)
        threads = f.word("%instance", InstanceWords.THREADS)
        return f.text(f"i32 {f.op(f'trunc i64 {threads} to i32')}")

    @property
    def exports(self) -> list[str]:
        names = ("create", "create_from_memory", "share", "prepare", "run", "threads", "destroy")
        return [f"{self.name}_{name}" for name in names]

    def source(self) -> str:
        """(Nothing interrupts the steps of a built program, unlike those that Python runs.)"""
        interrupted = Function("interrupted", "ptr %context", "i1").text("i1 false")
        engine = [binding.DECLARES, binding.evaluate(), binding.write(), steps.idle(is_x86_64()), steps.barrier()]
        engine += [steps.milliseconds(), steps.nanoseconds(), steps.held_up(), interrupted]
        engine += [steps.worker(), steps.wide(), pool.source()]
        tensors = "ptr %instance, ptr %inputs, ptr %outputs"
        own = [self.create(), self.create_from_memory(), self.create_from_file(), self.destroy()]
        own += [self.size_in_bytes(), self.fit(), self.describe(), self.prepare(), self.memory(), self.run()]
        own += [self.run_all(), self.threads(), self.locked("prepare", f"{tensors}, ptr %arena")]
        own += [self.locked("run", f"{tensors}, ptr %arena, i64 %bytes")]
        own += [self.share(), self.locked("share", "ptr %instance, ptr %other")]
        return "\n".join([DECLARES, *engine, *own])
