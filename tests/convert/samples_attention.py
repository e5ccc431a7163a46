"""Samples of attention, embeddings' gradients and bags."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    gradient = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    qkv = "unit(T, 2, 3, N, 4), unit(T, 2, 3, M, 4), unit(T, 2, 3, M, 4)"
    typed(
        attention,
        FLOATS,
        qkv,
        f"{qkv}, 0.0, True",
        f"{qkv}, scale=0.3",
        f"{qkv}, attn_mask=unit(T, N, M)",
        f"{qkv}, attn_mask=unit(T, 2, 1, N, M)",
    )
    add(
        attention,
        "unit(f32, N, 3, 5, 4), unit(f32, N, 3, 5, 4), unit(f32, N, 3, 5, 4)",
        "aten.clone.default(turned(f32, 2, 3, N, 4), memory_format=torch.contiguous_format), unit(f32, 2, 3, M, 4), unit(f32, 2, 3, M, 4)",
    )
    saved = "unit(T, 2, 3, N, 4), positive({}, 2, 3, N)"
    for name, wide in (("f32", "f32"), ("f64", "f64"), ("bf16", "f32"), ("f16", "f32")):
        inputs = f"unit(T, 2, 3, N, 4), {qkv}, {saved.format(wide)}".replace("(T", f"({name}")
        add(
            gradient,
            f"{inputs}, 0.0, False",
            f"{inputs}, 0.0, True, scale=0.3",
            f"{inputs}, 0.0, False, attn_mask=unit({name}, N, M)",
        )
    typed(
        "aten.embedding_dense_backward.default",
        FLOATS,
        "t(T, N, 3), index(5, N), 5, -1, False",
        "t(T, N, M, 3), index(5, N, M), 5, 2, False",
        "t(T, N, 3), index(5, N), 5, -1, True",
    )
    add(
        "aten.embedding_dense_backward.default",
        "t(f32, N, 3), index(5, N, dtype=i32), 5, -1, False",
        "t(f32, 0, 3), index(5, 0), 5, -1, False",
        "t(f32, N, 3), index(5, N), M, -1, False",
    )
    for name in ("_embedding_bag", "_embedding_bag_forward_only"):
        for mode in (0, 1, 2):
            typed(
                f"aten.{name}.default",
                ("f32", "f64", "f16", "bf16"),
                f"t(T, N, 3), index(5, M), torch.arange(3), False, {mode}",
            )
        add(
            f"aten.{name}.default",
            "t(f32, 9, M), index(5, N), torch.arange(3), False, 0, False, positive(f32, N)",
            "t(f32, N, 3), index(5, 3), torch.arange(4), False, 1, False, None, True",
            "t(f32, N, 3), index(5, M), torch.arange(3), False, 0, False, None, False, 2",
        )
