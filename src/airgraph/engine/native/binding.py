"""A frame for new sizes, as LLVM text: symbols are read from the arguments, values computed, and words written.

    bind(frame, args, threads) → 1 if the frame is for the sizes of these arguments now

A plan's values (plan/sizes.py) are computed by an interpreter of their operations. Which words of a frame depend on which
value is a table of (address, number of the value). Both take microseconds, so a size that was never seen before costs what
any other costs. What only sympy can compute, and sizes that do not fit in 64 bits, are left to Python.
"""

from __future__ import annotations

from airgraph.engine.native.libtorch import ask
from airgraph.engine.native.llvm.builder import Function
from airgraph.engine.native.tables import BindingWords, DefinitionWords, FrameWords
from airgraph.plan.sizes import SizeOp, Sizes

DECLARES = """
declare {i64, i1} @llvm.sadd.with.overflow.i64(i64, i64)
declare {i64, i1} @llvm.smul.with.overflow.i64(i64, i64)
"""
ROW = 4  # words of an operation


def code_words(sizes: Sizes) -> list[int]:
    return [int(word) for operation in sizes.code for word in operation]


def evaluate() -> str:
    """The operations, each with its result behind those before; 1 if one cannot be done here."""
    f = Function("evaluate", "ptr %code, i64 %count, ptr %values, i64 %first, ptr %questions", "i64")

    def one(i: str) -> None:
        row = f.row("%code", i, ROW)
        op, a, b, c = (f.word(row, n) for n in range(ROW))
        to = f.op(f"add i64 %first, {i}")
        cases = " ".join(f"i64 {int(name)}, label %{name.name}" for name in SizeOp if name != SizeOp.SYMPY)
        f.do(f"switch i64 {op}, label %SYMPY [ {cases} ]")

        def case(name: SizeOp, value: str) -> None:
            f.set("%values", to, value)
            f.do("br label %next")

        f.label("SYMPY")
        f.do("ret i64 1")
        f.label("CONST")
        case(SizeOp.CONST, a)
        f.label("COPY")
        case(SizeOp.COPY, f.word("%values", a))
        f.label("CHOOSE")
        chosen = f.choose(f.test("ne", f.word("%values", a), 0), "i64", b, c)
        case(SizeOp.CHOOSE, f.word("%values", chosen))
        f.label("ASK")
        function, operands = f.word("%questions", a, "ptr"), f.at("%values", b, "i64")
        case(SizeOp.ASK, f.op(f"call i64 {function}(ptr {operands})"))
        for name, instruction in ((SizeOp.ADD, "sadd"), (SizeOp.MUL, "smul")):
            f.label(name.name)
            x, y = f.word("%values", a), f.word("%values", b)
            pair = f.op(f"call {{i64, i1}} @llvm.{instruction}.with.overflow.i64(i64 {x}, i64 {y})")
            f.give(f.op(f"extractvalue {{i64, i1}} {pair}, 1"), "i64 1")
            case(name, f.op(f"extractvalue {{i64, i1}} {pair}, 0"))
        for name in (SizeOp.FLOOR, SizeOp.MOD):
            f.label(name.name)
            x, y = f.word("%values", a), f.word("%values", b)
            f.give(f.test("eq", y, 0), "i64 1")
            case(name, floored(f, x, y)[0 if name == SizeOp.FLOOR else 1])
        for name in (SizeOp.MIN, SizeOp.MAX):
            f.label(name.name)
            x, y = f.word("%values", a), f.word("%values", b)
            case(name, f.min(x, y) if name == SizeOp.MIN else f.max(x, y))
        for name, how in ((SizeOp.LESS, "slt"), (SizeOp.EQUAL, "eq")):
            f.label(name.name)
            x, y = f.word("%values", a), f.word("%values", b)
            case(name, f.op(f"zext i1 {f.test(how, x, y)} to i64"))
        f.label("next")

    f.loop("0", "%count", 1, one)
    return f.text("i64 0")


def floored(f: Function, x: str, y: str) -> tuple[str, str]:
    """Quotient and remainder as Python has them: rounded down."""
    quotient, rest = f.op(f"sdiv i64 {x}, {y}"), f.op(f"srem i64 {x}, {y}")
    other_sign = f.test("slt", f.op(f"xor i64 {rest}, {y}"), 0)
    low = f.op(f"and i1 {f.test('ne', rest, 0)}, {other_sign}")
    return f.choose(low, "i64", f.sub(quotient, 1), quotient), f.choose(low, "i64", f.add(rest, y), rest)


def write() -> str:
    """Every word of a frame that depends on sizes, from its values."""
    f = Function("write", "ptr %frame", exported=True)
    table, values = f.word("%frame", FrameWords.WORD_TABLE, "ptr"), f.word("%frame", FrameWords.VALUES, "ptr")

    def one(i: str) -> None:
        row = f.row(table, i, 2)
        f.set(f.word(row, 0, "ptr"), 0, f.word(values, f.word(row, 1)))

    f.loop("0", f.word("%frame", FrameWords.SIZED), 1, one)
    return f.text()


def tell() -> str:
    """The symbols, from the arguments that define them; 1 if one is not what it should be."""
    f = Function("tell", "ptr %frame, ptr %binding, ptr %args", "i64")
    f.do("%out = alloca i64")
    table, values = f.word("%binding", BindingWords.DEFINITION_TABLE, "ptr"), f.word("%frame", FrameWords.VALUES, "ptr")
    plain, parameter = f.word("%frame", FrameWords.TENSOR_TYPE), f.word("%frame", FrameWords.PARAMETER_TYPE)
    f.give(f.test("ne", f.op("call i64 @PyList_Size(ptr %args)"), f.word("%frame", FrameWords.ARGS)), "i64 1")

    def one(i: str) -> None:
        row = f.row(table, i, DefinitionWords.WORDS)
        kind, symbol = f.word(row, DefinitionWords.KIND), f.word(row, DefinitionWords.SYMBOL)
        object = f.op(f"call ptr @PyList_GetItem(ptr %args, i64 {f.word(row, DefinitionWords.ARGUMENT)})")
        f.when(f.test("eq", kind, DefinitionWords.NUMBER), lambda: number(symbol, object))
        f.when(f.test("ne", kind, DefinitionWords.NUMBER), lambda: dimension(row, kind, symbol, object))

    def number(symbol: str, object: str) -> None:
        value = f.op(f"call i64 @PyLong_AsLongLong(ptr {object})")
        f.when(f.test("eq", value, -1), no_number)
        f.set(values, symbol, value)

    def no_number() -> None:
        pending = f.op("call ptr @PyErr_Occurred()")
        f.invoke("@PyErr_Clear")
        f.give(f.test("ne", pending, "null", "ptr"), "i64 1")

    def dimension(row: str, kind: str, symbol: str, object: str) -> None:
        type = f.word(object, 1)
        f.give(f.op(f"and i1 {f.test('ne', type, plain)}, {f.test('ne', type, parameter)}"), "i64 1")
        handle = f.at(object, 2, "i64")  # PyObject_HEAD, then the at::Tensor: a handle is its address
        ask(f, "aoti_torch_get_dim", handle, lambda: f.do("ret i64 1"))
        axis = f.word(row, DefinitionWords.AXIS)
        f.give(f.test("sle", f.word("%out", 0), axis), "i64 1")
        ask(f, "aoti_torch_get_sizes", handle, lambda: f.do("ret i64 1"))
        size = f.word(f.word("%out", 0, "ptr"), axis)
        ask(f, "aoti_torch_get_strides", handle, lambda: f.do("ret i64 1"))
        stride = f.word(f.word("%out", 0, "ptr"), axis)
        given = f.choose(f.test("eq", kind, DefinitionWords.SIZE), "i64", size, stride)
        multiple = f.op(f"sub i64 {given}, {f.word(row, DefinitionWords.OFFSET)}")
        f.set(values, symbol, f.op(f"sdiv i64 {multiple}, {f.word(row, DefinitionWords.FACTOR)}"))

    f.loop("0", f.word("%binding", BindingWords.DEFINITIONS), 1, one)
    return f.text("i64 0")


def bind() -> str:
    """Makes a frame one for these arguments and so many threads. If that fails, it is one for nothing (no threads)."""
    f = Function("bind", "ptr %frame, ptr %args, i64 %threads", "i1")
    binding, values = f.word("%frame", FrameWords.BINDING, "ptr"), f.word("%frame", FrameWords.VALUES, "ptr")
    f.set("%frame", FrameWords.THREADS, "0")
    f.set(values, 0, "%threads")
    told = f.op(f"call i64 @tell(ptr %frame, ptr {binding}, ptr %args)")
    f.give(f.test("ne", told, 0), "i1 false")
    code, count, first = (
        f.word(binding, n, kind)
        for n, kind in ((BindingWords.CODE, "ptr"), (BindingWords.OPERATIONS, "i64"), (BindingWords.SYMBOLS, "i64"))
    )
    questions = f.word(binding, BindingWords.QUESTIONS, "ptr")
    failed = f.op(f"call i64 @evaluate(ptr {code}, i64 {count}, ptr {values}, i64 {first}, ptr {questions})")
    f.give(f.test("ne", failed, 0), "i1 false")
    f.invoke("@write", ("ptr", "%frame"))
    f.set("%frame", FrameWords.THREADS, "%threads")
    return f.text("i1 true")


def source() -> str:
    return "\n".join([DECLARES, evaluate(), write(), tell(), bind()])
