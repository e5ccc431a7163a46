"""Object code in memory: by our own loader, on the architectures it knows."""

import ctypes
import platform

import pytest

from airgraph.engine.native.llvm import loader
from airgraph.engine.native.llvm.relocations import ARCHITECTURES, X86, Addresses, Arm, LoadError

pytestmark = pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="LLVM's linker loads objects here")

# A constant by address, one by value, calls to a function of the object, to one of C's and to one that is handed in.
TEXT = """
@numbers = internal constant [4 x double] [double 0.5, double 0.25, double 8.0, double 3.0]
@text = internal constant [6 x i8] c"abcde\\00"

declare i64 @strlen(ptr) nounwind
declare i64 @given(i64) nounwind

define internal double @number(i64 %i) noinline nounwind {
  %at = getelementptr double, ptr @numbers, i64 %i
  %value = load double, ptr %at
  ret double %value
}

define double @sum(i64 %i) nounwind {
  %a = call double @number(i64 %i)
  %b = fadd double %a, 0x3FF3C0CA428C1D2B
  ret double %b
}

define i64 @length() nounwind {
  %n = call i64 @strlen(ptr @text)
  %m = tail call i64 @given(i64 %n)
  ret i64 %m
}
"""


@pytest.fixture(scope="module")
def code():
    from airgraph.engine.native.llvm import compiler

    return compiler.compiled(TEXT)


@pytest.fixture(scope="module")
def given():
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda n: 100 + n)


def imports(given):
    return {"given": ctypes.cast(given, ctypes.c_void_p).value}


def test_code_finds_its_constants_and_what_it_calls(code, given):
    loaded = loader.load(code, imports(given), ("sum", "length"))
    total = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(loaded["sum"])
    assert [total(i) for i in range(4)] == [n + float.fromhex("0x1.3c0ca428c1d2bp0") for n in (0.5, 0.25, 8.0, 3.0)]
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(loaded["length"])() == 105


def test_other_files_are_refused(code, given):
    with pytest.raises(LoadError, match="no relocatable object"):
        loader.load(b"\0" * 200, {}, ())
    with pytest.raises(LoadError, match="a broken object"):
        loader.load(code[:100], imports(given), ())
    with pytest.raises(LoadError, match="nobody has given"):
        loader.load(code, {}, ())
    with pytest.raises(LoadError, match="no function other"):
        loader.load(code, imports(given), ("other",))


@pytest.mark.parametrize("architecture", [X86(), Arm()], ids=lambda a: a.name)
def test_relocations_that_are_not_known_are_refused(architecture):
    with pytest.raises(LoadError, match="a relocation of type 999"):
        architecture.write(memory := bytearray(8), 0, 999, Addresses(0, 0, 0, 0))
    assert memory == bytes(8)


def operand(kind, at, target, entry=0):
    memory = bytearray(8)
    Arm().write(memory, 0, kind, Addresses(at, target, 0, entry))
    return int.from_bytes(memory[:4], "little")


def test_operands_of_arm():
    assert operand(Arm.CALL, 0x1000, 0x0FF8) == 0x3FFFFFE  # two instructions back
    assert operand(Arm.CALL, 0x1000, 1 << 40, entry=0x2000) == 0x400  # through the table
    with pytest.raises(LoadError, match="a call over"):
        operand(Arm.JUMP, 0x1000, 1 << 40)
    assert operand(Arm.PAGE, 0x1FF8, 0x6010) == 1 << 29 | 1 << 5  # five pages: one in the lower bits, one above
    assert operand(286, 0, 0x6010) == 2 << 10  # eight bytes at a time
    assert operand(Arm.ENTRY_REST, 0, 0, entry=0x6010) == 3 << 10  # the address follows two instructions
