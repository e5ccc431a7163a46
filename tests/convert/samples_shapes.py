"""Windows, diagonals, rolls and other readings of the same elements."""

from __future__ import annotations

from typing import Any

FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")


def samples(add: Any, typed: Any) -> None:
    views(add, typed)
    diagonals(add, typed)


def views(add: Any, typed: Any) -> None:
    typed("aten.squeeze.default", ALL, "t(T, N, 1, M)", "t(T, N, M)", "t(T)", "t(T, 1, 1)", "turned(T, N, 1)")
    typed(
        "aten.unfold.default",
        ALL,
        "t(T, 4, 9), 1, 3, 2",
        "t(T, 9), 0, 4, 1",
        "t(T, N, M), -1, 2, 2",
        "turned(T, 5, 9), 0, 2, 1",
        "t(T), 0, 1, 1",
        "t(T, 2, 9, 3), 1, 9, 5",
    )
    add("aten.unfold.default", "t(f32, 9, 7) + 1, 1, 3, 2", "t(f32, N, M) + 1, 0, 2, 3", "t(f32, 4, 9)[1:], 1, 3, 2")
    typed("aten.view.dtype", ALL, "t(T, N, M), T")
    add(
        "aten.view.dtype",
        "t(f32, N, M), i32",
        "t(i64, N), f64",
        "t(bf16, N), f16",
        "t(i32), f32",
        "turned(f32, N, M), i32",
        "t(f32, N, M), i64",
        "t(f32, N, M), f16",
        "t(u8, N), i8",
        "t(c64, N), f32",
        "odd(f32) + 1, i32",
        "t(f32, 0, 3), i32",
        "t(f32, N, M), torch.uint32",
    )
    typed(
        "aten.roll.default",
        ALL,
        "t(T, N, M), [1], [0]",
        "t(T, N, M), [2, -1], [0, 1]",
        "t(T, N, M), [3]",
        "t(T), [1]",
        "turned(T, N, M), [100], [-1]",
        "t(T, 0, 3), [1], [0]",
    )
    add("aten.roll.default", "t(f32, N, M), [N - 1], [1]", "t(f32, N, M), [1, 2], [0, 0]")
    for k in range(-1, 6):
        add("aten.rot90.default", f"t(f32, N, M), {k}", f"t(i64, 2, N, M), {k}, [-1, 0]")
    typed("aten.rot90.default", ALL, "t(T, N, M)", "turned(T, N, M), 3, [1, 0]")
    typed("aten.unsafe_split.Tensor", ALL, "t(T, 4, M), 2", "t(T, N, 5), 2, -1", "t(T, 3), 7", "turned(T, N, 4), 3, 1")
    typed(
        "aten.unsafe_split_with_sizes.default", ALL, "t(T, 5, M), [2, 3]", "t(T, N, 4), [1, 0, 3], -1", "t(T, N), [N]"
    )


def diagonals(add: Any, typed: Any) -> None:
    typed(
        "aten.diagonal.default",
        ALL,
        "t(T, N, M)",
        "t(T, N, M), 1",
        "t(T, N, M), -2, 1, 0",
        "t(T, 2, N, M), 1, -1, 0",
        "turned(T, N, M)",
        "t(T, 4, 3), 5",
        "t(T, 3, 5, 2), -1, 0, 1",
    )
    add("aten.diagonal.default", "t(f32, N, M, 2), 0, 2, 0", "t(f32, 3, 0)", "t(f32, N, M) + 1, 2")
    typed(
        "aten.diag_embed.default",
        ALL,
        "t(T, N)",
        "t(T, N, M), 1",
        "t(T, N, M), -2, 0, 2",
        "t(T, 2, N), 0, 1, 0",
        "turned(T, N, M)",
        "t(T, 0)",
    )
    add("aten.diag_embed.default", "t(f32, 2, N, M), 1, -1, 0", "t(f32, 2, 3), -1, 2, 0")
    typed(
        "aten.diagonal_scatter.default",
        ALL,
        "t(T, 4, M), positive(T, 4)",
        "t(T, 9, 7), positive(T, 6), 1",
        "t(T, 9, 7), positive(T, 5), -2, 1, 0",
        "t(T, 2, 9, M), t(T, 9, 2), 0, 0, -1",
    )
    add(
        "aten.diagonal_scatter.default",
        "turned(f32, 5, 9), t(f32, 5)",
        "t(f32, 4, 4), t(i64, 4)",
        "t(f32, 2, 9, 7), t(f32, 2, 6), 1, -2, -1",
    )
    typed(
        "aten.diagonal_backward.default",
        ALL,
        "t(T, 4), [4, M], 0, 0, 1",
        "t(T, 5), [9, 7], -2, 1, 0",
        "t(T, N, 4), [4, N, M], 0, 0, -1",
    )
    add("aten.diagonal_backward.default", "t(f32, N), [N, M], 0, 0, 1", "t(f32, 0), [2, 2], 3, 0, 1")
    typed("aten.trace.default", ALL, "t(T, N, M)", "turned(T, N, M)", "t(T, 0, 3)", "t(T, 3, 3)")
