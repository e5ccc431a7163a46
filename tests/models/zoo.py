"""Real architectures, made tiny: one row each, with random weights, so that nothing is downloaded.

A row names the configuration and model classes of `transformers`, the arguments that make the model small, and a function
that makes inputs for a batch and a length. Arguments that many rows share are the small dictionaries at the top.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

Inputs = dict[str, torch.Tensor]
VOCAB = 99


# -- inputs ---------------------------------------------------------------------------------------------------------
def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(10, VOCAB, (batch, length))


def text(batch: int, length: int) -> Inputs:
    return {"input_ids": tokens(batch, length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def unmasked(batch: int, length: int) -> Inputs:
    return {"input_ids": tokens(batch, length)}


def pair(batch: int, length: int) -> Inputs:
    return {**text(batch, length), "decoder_input_ids": tokens(batch, length)}


def layout(batch: int, length: int) -> Inputs:
    corner = torch.randint(0, 20, (batch, length, 2))
    return {**text(batch, length), "bbox": torch.cat([corner, corner + torch.randint(1, 20, (batch, length, 2))], -1)}


def image(size: int = 32, channels: int = 3) -> Callable[[int, int], Inputs]:
    return lambda batch, length: {"pixel_values": torch.randn(batch, channels, size, size)}


def sound(per_token: int) -> Callable[[int, int], Inputs]:
    """A waveform, so many samples for each unit of length."""
    return lambda batch, length: {"input_values": torch.randn(batch, length * per_token)}


def image_and_text(size: int = 32) -> Callable[[int, int], Inputs]:
    return lambda batch, length: {**text(batch, length), **image(size)(batch, length)}


def pictures_in_text(count: int, token: int, size: int = 32) -> Callable[[int, int], Inputs]:
    """Text that starts with `count` places for the patches of an image."""

    def make(batch: int, length: int) -> Inputs:
        given = text(batch, length + count)
        given["input_ids"][:, :count] = token
        return {**given, **image(size)(batch, length)}

    return make


def spectrogram(name: str, mels: int, frames: int, *, mels_first: bool, decoder: bool = False) -> Callable[..., Inputs]:
    def make(batch: int, length: int) -> Inputs:
        shape = (batch, mels, frames) if mels_first else (batch, frames, mels)
        return {name: torch.randn(shape)} | ({"decoder_input_ids": tokens(batch, length)} if decoder else {})

    return make


def series(length: int, channels: int) -> Callable[[int, int], Inputs]:
    return lambda batch, _: {"past_values": torch.randn(batch, length, channels)}


# -- arguments that many rows share: one layer, as a second one traces and compiles the same again ------------------
TWO = {"num_hidden_layers": 2}  # where layers differ, and one model of each family
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {**BERT, **SPECIAL, "num_key_value_heads": 2}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    **SPECIAL,
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
STAGES = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WAVE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
CLIP_TEXT = {**BERT, **SPECIAL, "projection_dim": 16}
CLIP_IMAGE = {**VIT, "projection_dim": 16}


# -- the table ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """One architecture: `transformers.<config>(**args)` makes `transformers.<model>`."""

    name: str
    kind: str
    config: str
    model: str
    args: dict[str, Any]
    inputs: Callable[[int, int], Inputs] = text
    attention: str = "sdpa"
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # configurations inside this one

    def make(self) -> torch.nn.Module:
        """The model in float32, in eval mode, the same weights every time."""
        torch.manual_seed(0)
        inner = {name: getattr(transformers, kind)(**args) for name, (kind, args) in self.parts.items()}
        config = getattr(transformers, self.config)(**self.args, **inner)
        config._attn_implementation = self.attention
        return getattr(transformers, self.model)(config).eval()


# A table stays a table: the formatter would put every argument on a line of its own.
ENCODERS = [
    Row("bert", "encoder", "BertConfig", "BertForMaskedLM", {**BERT, **TWO}),
    Row("roberta", "encoder", "RobertaConfig", "RobertaForSequenceClassification", {**BERT, "pad_token_id": 1}),
    Row(
        "distilbert",
        "encoder",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    Row("electra", "encoder", "ElectraConfig", "ElectraForPreTraining", {**BERT, "embedding_size": 16}),
    Row("albert", "encoder", "AlbertConfig", "AlbertForMaskedLM", {**BERT, "embedding_size": 16}),
    Row(
        "deberta_v2",
        "encoder",
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        attention="eager",
    ),
    Row(
        "modernbert",
        "encoder",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**BERT, **SPECIAL, "cls_token_id": 3, "sep_token_id": 4},
    ),
    Row(
        "esm",
        "encoder",
        "EsmConfig",
        "EsmForMaskedLM",
        {**BERT, "pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"},
    ),
    Row(
        "convbert",
        "encoder",
        "ConvBertConfig",
        "ConvBertForMaskedLM",
        {**BERT, "embedding_size": 32, "conv_kernel_size": 3},
        attention="eager",
    ),
    Row("fnet", "encoder", "FNetConfig", "FNetForMaskedLM", BERT, unmasked, attention="eager"),
    Row(
        "mobilebert",
        "encoder",
        "MobileBertConfig",
        "MobileBertForMaskedLM",
        {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        attention="eager",
    ),
    Row(
        "nystromformer",
        "encoder",
        "NystromformerConfig",
        "NystromformerForMaskedLM",
        {**BERT, "segment_means_seq_len": 16, "num_landmarks": 4},
        attention="eager",
    ),
    Row("layoutlm", "encoder", "LayoutLMConfig", "LayoutLMForTokenClassification", BERT, layout, attention="eager"),
    Row(
        "squeezebert",
        "encoder",
        "SqueezeBertConfig",
        "SqueezeBertForMaskedLM",
        {
            **BERT,
            "embedding_size": 32,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        attention="eager",
    ),
]

DECODERS = [
    Row("gpt2", "decoder", "GPT2Config", "GPT2LMHeadModel", {**GPT, "n_layer": 2}),
    Row(
        "gpt_neo",
        "decoder",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        attention="eager",
    ),
    Row("gpt_neox", "decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", {**BERT, **SPECIAL}),
    Row(
        "opt",
        "decoder",
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            **SPECIAL,
        },
    ),
    Row(
        "bloom",
        "decoder",
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 4, **SPECIAL},
        attention="eager",
    ),
    Row(
        "falcon",
        "decoder",
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **SPECIAL},
    ),
    Row("llama", "decoder", "LlamaConfig", "LlamaForCausalLM", {**LLAMA, **TWO}),
    Row("mistral", "decoder", "MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
    Row("qwen2", "decoder", "Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    Row("qwen3", "decoder", "Qwen3Config", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    Row("gemma", "decoder", "GemmaConfig", "GemmaForCausalLM", {**LLAMA, "head_dim": 8}),
    Row(
        "gemma2",
        "decoder",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**LLAMA, **TWO, "head_dim": 8, "sliding_window": 4},
        attention="eager",
    ),
    Row(
        "gemma3",
        "decoder",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**LLAMA, **TWO, "head_dim": 8, "sliding_window": 4},
    ),
    Row("phi", "decoder", "PhiConfig", "PhiForCausalLM", LLAMA),
    Row("phi3", "decoder", "Phi3Config", "Phi3ForCausalLM", LLAMA),
    Row("olmo2", "decoder", "Olmo2Config", "Olmo2ForCausalLM", LLAMA),
    Row("cohere", "decoder", "CohereConfig", "CohereForCausalLM", LLAMA),
    Row(
        "mpt",
        "decoder",
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "expansion_ratio": 2},
        attention="eager",
    ),
]

EXPERT_MODELS = [
    Row("mixtral", "moe", "MixtralConfig", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    Row("qwen3_moe", "moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**LLAMA, **EXPERTS, "head_dim": 8}),
    Row(
        "gpt_oss",
        "moe",
        "GptOssConfig",
        "GptOssForCausalLM",
        {**LLAMA, **TWO, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        attention="eager",
    ),
    Row(
        "deepseek_v3",
        "moe",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LLAMA,
            **TWO,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
]

STATE_SPACES = [
    Row(
        "mamba",
        "ssm",
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, **SPECIAL},
        attention="eager",
    ),
    Row(
        "mamba2",
        "ssm",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 1,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            **SPECIAL,
        },
        attention="eager",
    ),
    Row(
        "recurrent_gemma",
        "ssm",
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {**LLAMA, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 4},
    ),
    Row(
        "rwkv",
        "ssm",
        "RwkvConfig",
        "RwkvForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "context_length": 64,
            **SPECIAL,
        },
        unmasked,
        attention="eager",
    ),
    Row(
        "lfm2",
        "ssm",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**LLAMA, **TWO, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    Row(
        "qwen3_next",
        "ssm",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **LLAMA,
            **TWO,
            **EXPERTS,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
]

PAIRS = [
    Row("t5", "encoder-decoder", "T5Config", "T5ForConditionalGeneration", {**T5, "num_layers": 2}, pair),
    Row("bart", "encoder-decoder", "BartConfig", "BartForConditionalGeneration", BART, pair),
]

VISION = [
    Row("vit", "vision", "ViTConfig", "ViTForImageClassification", {**VIT, **TWO}, image()),
    Row(
        "beit",
        "vision",
        "BeitConfig",
        "BeitForImageClassification",
        {**VIT, "use_relative_position_bias": True},
        image(),
    ),
    Row("dinov2", "vision", "Dinov2Config", "Dinov2ForImageClassification", VIT, image()),
    Row(
        "swin",
        "vision",
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        image(),
    ),
    Row(
        "convnext",
        "vision",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {**STAGES, "num_stages": 4},
        image(64),
        attention="eager",
    ),
    Row(
        "resnet",
        "vision",
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 16, **STAGES},
        image(64),
        attention="eager",
    ),
    Row(
        "segformer",
        "vision",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 32, 32],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        image(64),
        attention="eager",
    ),
    Row(
        "poolformer",
        "vision",
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        {**STAGES},
        image(64),
        attention="eager",
    ),
    Row(
        "hiera",
        "vision",
        "HieraConfig",
        "HieraForImageClassification",
        {
            "image_size": [32, 32],
            "patch_stride": [4, 4],
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
        },
        image(),
        attention="eager",
    ),
]

AUDIO = [
    Row("wav2vec2", "audio", "Wav2Vec2Config", "Wav2Vec2ForCTC", WAVE, sound(40)),
    Row("wavlm", "audio", "WavLMConfig", "WavLMForCTC", WAVE, sound(40), attention="eager"),
    Row(
        "whisper",
        "audio",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
        spectrogram("input_features", 8, 32, mels_first=True, decoder=True),
    ),
    Row(
        "ast",
        "audio",
        "ASTConfig",
        "ASTForAudioClassification",
        {k: v for k, v in VIT.items() if k != "image_size"}
        | {"max_length": 32, "num_mel_bins": 16, "time_stride": 8, "frequency_stride": 8},
        spectrogram("input_values", 16, 32, mels_first=False),
    ),
    Row(
        "encodec",
        "audio",
        "EncodecConfig",
        "EncodecModel",
        {
            "num_filters": 4,
            "upsampling_ratios": [4],
            "hidden_size": 16,
            "codebook_size": 16,
            "codebook_dim": 16,
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
            "kernel_size": 3,
            "last_kernel_size": 3,
        },
        lambda batch, length: {"input_values": torch.randn(batch, 1, length * 40)},
        attention="eager",
    ),
]

MULTIMODAL = [
    Row(
        "clip",
        "multimodal",
        "CLIPConfig",
        "CLIPModel",
        {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGE, "projection_dim": 16},
        image_and_text(),
    ),
    Row(
        "siglip",
        "multimodal",
        "SiglipConfig",
        "SiglipModel",
        {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGE},
        image_and_text(),
    ),
    Row(
        "llava",
        "multimodal",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"image_token_index": 5, "vision_feature_layer": -1},
        pictures_in_text(16, 5),
        parts={"text_config": ("LlamaConfig", LLAMA), "vision_config": ("CLIPVisionConfig", CLIP_IMAGE)},
    ),
    Row(
        "paligemma",
        "multimodal",
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        {"image_token_index": 5, "projection_dim": 32},
        pictures_in_text(16, 5),
        parts={"text_config": ("GemmaConfig", {**LLAMA, "head_dim": 8}), "vision_config": ("SiglipVisionConfig", VIT)},
    ),
]

SERIES = [
    Row(
        "patchtst",
        "series",
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 4,
            "d_model": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "num_targets": 2,
        },
        series(32, 2),
        attention="eager",
    )
]

ZOO = {
    row.name: row
    for rows in (ENCODERS, DECODERS, EXPERT_MODELS, STATE_SPACES, PAIRS, VISION, AUDIO, MULTIMODAL, SERIES)
    for row in rows
}
