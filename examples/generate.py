"""`generate()` of transformers, with a cache that grows and with a static one. Random weights: the text means nothing."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(0, 128, (1, 5))
settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

expected = model.generate(prompt, **settings)

# The cache is longer at every step: PyTorch compiles for one length, then once more for any.
model.forward = torch.compile(model.forward, backend="airgraph", dynamic=True)
assert torch.equal(model.generate(prompt, **settings), expected)

# A static cache has its final size from the start: one graph decodes all tokens.
assert torch.equal(model.generate(prompt, cache_implementation="static", disable_compile=True, **settings), expected)
print("generated:", expected[0].tolist())
