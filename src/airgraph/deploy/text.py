"""Constants of an LLVM module: strings, and tables of whole numbers and addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Constants:
    """Constants by the names they get, each string once."""

    def __init__(self) -> None:
        self.strings: dict[str, str] = {}
        self.lines: list[str] = []

    def string(self, text: str) -> str:
        """The address of a text that ends with a zero byte."""
        if text not in self.strings:
            self.strings[text] = f"@text_{len(self.strings)}"
            data = text.encode() + b"\0"
            shown = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in data)
            self.lines.append(
                f'{self.strings[text]} = private unnamed_addr constant [{len(data)} x i8] c"{shown}", align 1'
            )
        return self.strings[text]

    def table(self, name: str, words: Iterable[int | str]) -> str:
        """Words in a row: numbers, and addresses by name."""
        row = list(words) or [0]
        kinds = ", ".join("ptr" if isinstance(w, str) else "i64" for w in row)
        if any(isinstance(w, str) for w in row):
            content = ", ".join(f"ptr {w}" if isinstance(w, str) else f"i64 {w}" for w in row)
            self.lines.append(f"@{name} = private constant {{ {kinds} }} {{ {content} }}, align 8")
        else:
            content = ", ".join(f"i64 {w}" for w in row)
            self.lines.append(f"@{name} = private constant [{len(row)} x i64] [{content}], align 8")
        return f"@{name}"

    def rows(self, name: str, rows: Iterable[Sequence[int | str]]) -> str:
        return self.table(name, [word for row in rows for word in row])

    def source(self) -> str:
        return "\n".join(self.lines)
