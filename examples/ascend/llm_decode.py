"""Generating text token by token: a static cache, fused ops, and one step compiled to a graph that is replayed.

The prompt runs once through the model as it is. After that each token is one call of the compiled step. Its shapes are
fixed; what changes is where in the cache the token goes (a tensor) and how much of the cache is filled (a number, which
the attention takes from the host).
"""

import torch
import torch_npu
from torch import nn

VOCABULARY, LAYERS, HEADS, KEY_HEADS, SIZE, LONGEST = 96, 2, 8, 2, 16, 32
HIDDEN, INNER = HEADS * SIZE, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KEY_HEADS) * SIZE, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norms = nn.ParameterList([torch.ones(HIDDEN), torch.ones(HIDDEN)])
        self.register_buffer("keys", torch.zeros(1, LONGEST, KEY_HEADS, SIZE))
        self.register_buffer("values", torch.zeros(1, LONGEST, KEY_HEADS, SIZE))

    def forward(self, x, places, length, cos, sin, hidden):
        normed = torch_npu.npu_rms_norm(x, self.norms[0])[0]
        q, k, v = self.qkv(normed).unflatten(2, (-1, SIZE)).split([HEADS, KEY_HEADS, KEY_HEADS], 2)
        q, k = torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)
        torch_npu.scatter_update_(self.keys, places[:1], k, 1)
        torch_npu.scatter_update_(self.values, places[:1], v, 1)
        attended, _ = torch_npu.npu_fused_infer_attention_score(
            q,
            self.keys,
            self.values,
            atten_mask=hidden,
            actual_seq_lengths_kv=[length],
            num_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            input_layout="BSND",
            scale=SIZE**-0.5,
            sparse_mode=0,
        )
        normed, _, x = torch_npu.npu_add_rms_norm(x, self.out(attended.flatten(2)), self.norms[1])
        return x + self.down(torch_npu.npu_swiglu(self.gate_up(normed)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angle = torch.arange(LONGEST)[:, None] * 1e4 ** (-torch.arange(SIZE // 2) / (SIZE // 2))
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def forward(self, tokens, places, length, hidden=None):
        x = self.embedding(tokens)
        cos, sin = self.cos[places][None, :, None], self.sin[places][None, :, None]
        for layer in self.layers:
            x = layer(x, places, length, cos, sin, hidden)
        return self.head(x[:, -1])


def generate(model, prompt, count):
    """The tokens and the logits they were chosen by."""
    step = torch.compile(model, backend="npugraph_ex", dynamic=True, fullgraph=True)
    length, places = prompt.shape[1], torch.arange(prompt.shape[1]).npu()
    hidden = torch.ones(length, LONGEST, dtype=torch.bool).triu(1).npu()  # a token of the prompt sees what is before it
    logits = [model(prompt.npu(), places, length, hidden)]
    while len(logits) < count:
        token, place = logits[-1].argmax(-1, keepdim=True), torch.tensor([length]).npu()
        length += 1
        logits.append(step(token, place, length))
    logits = torch.cat(logits).float().cpu()
    return logits.argmax(-1), logits


def turned(x, cos, sin):
    return x * cos + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * sin


def plain(model, tokens):
    """The whole sequence at once on the CPU, in float32 and without a cache: the logits behind each token."""
    x = model.embedding(tokens)
    cos, sin = (t[: tokens.shape[1], None] for t in (model.cos, model.sin))
    for layer in model.layers:
        normed = nn.functional.rms_norm(x, (HIDDEN,), layer.norms[0], 1e-6)
        q, k, v = layer.qkv(normed).unflatten(2, (-1, SIZE)).split([HEADS, KEY_HEADS, KEY_HEADS], 2)
        q, k, v = (t.transpose(1, 2) for t in (turned(q, cos, sin), turned(k, cos, sin), v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + layer.out(y.transpose(1, 2).flatten(2))
        gate, up = layer.gate_up(nn.functional.rms_norm(x, (HIDDEN,), layer.norms[1], 1e-6)).chunk(2, -1)
        x = x + layer.down(nn.functional.silu(gate) * up)
    return model.head(x)[0]


@torch.no_grad()
def main():
    torch.manual_seed(3)
    model, prompt = Model(), torch.randint(0, VOCABULARY, (1, 6))
    tokens, logits = generate(model.half().npu(), prompt, 16)
    expected = plain(model.float().cpu(), torch.cat([prompt, tokens[None]], 1))[prompt.shape[1] - 1 : -1]
    worst = (logits - expected).abs().max().item()
    # Logits are around 1; a float16 has eleven bits, and every layer rounds a few times.
    assert 0 < worst < 5e-3, worst
    assert (expected.amax(1, keepdim=True) - expected.gather(1, tokens[:, None])).max() < 2 * worst, "other tokens"
    print(
        f"{len(tokens)} tokens from a cache of {LONGEST} places, logits within {worst:.4f} of float32 without a cache:"
    )
    print(*tokens.tolist())


if __name__ == "__main__":
    main()
