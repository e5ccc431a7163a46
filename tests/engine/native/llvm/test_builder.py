"""LLVM text has one builder: what it writes, and that nobody takes it apart."""

import ast
import textwrap
from pathlib import Path

import airgraph.engine.native
from airgraph.engine.native.llvm.builder import Function


def test_a_loop():
    f = Function("twice", "ptr %x, i64 %n")

    def body(i: str) -> None:
        place = f.at("%x", i)
        value = f.load("float", place)
        f.store("float", f.fadd("float", value, value), place)

    f.loop("0", "%n", 1, body)
    assert f.text() == textwrap.dedent("""\
        define internal void @twice(ptr %x, i64 %n) nounwind {
        entry:
          %v5 = icmp slt i64 0, %n
          br i1 %v5, label %loop1, label %done2
        loop1:
          %i3 = phi i64 [ 0, %entry ], [ %i4, %loop1 ]
          %v6 = getelementptr inbounds float, ptr %x, i64 %i3
          %v7 = load float, ptr %v6, align 4
          %v8 = fadd float %v7, %v7
          store float %v8, ptr %v6, align 4
          %i4 = add i64 %i3, 1
          %v9 = icmp slt i64 %i4, %n
          br i1 %v9, label %loop1, label %done2
        done2:
          ret void
        }
        """)


def test_a_sum_that_is_carried():
    f = Function("total", "ptr %x, i64 %n", "i64", exported=True)
    with f.each("0", "%n", 1, [("i64", "0")]) as loop:
        loop.next = [f.add(loop.carried[0], f.word("%x", loop.i))]
    lines = f.text(f"i64 {loop.carried[0]}").splitlines()
    assert lines[0] == "define i64 @total(ptr %x, i64 %n) nounwind {"
    assert [line.strip() for line in lines if "phi" in line] == [
        "%i3 = phi i64 [0, %entry], [%v9, %each1]",
        "%p4 = phi i64 [0, %entry], [%v8, %each1]",
        "%v11 = phi i64 [0, %entry], [%v8, %each1]",
    ]


def test_no_text_is_taken_apart():
    """Regular expressions read what PyTorch says of its kernels and what the system says of the CPU, and no text of ours."""
    root = Path(airgraph.engine.native.__file__).parent
    users = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) and any(alias.name == "re" for alias in node.names)
    }
    assert users <= {"calls/schema.py", "llvm/cpu.py"}
