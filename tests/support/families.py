"""Tiny random models of many families, for tests that must hold for all of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

DROP = object()  # a field that the family's configuration does not have
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# A window that 300 tokens pass, and one layer of each kind.
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {
    "num_key_value_heads": DROP,
    "head_dim": DROP,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "vocab_size": 97,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None, "head_dim": DROP, "original_max_position_embeddings": 1024},
    "gpt2": GPT2,
    "gpt_neox": {"num_key_value_heads": DROP, "head_dim": DROP},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "qwen3_next": LINEAR,
    "falcon": {
        "head_dim": DROP,
        "num_kv_heads": 4,
        "new_decoder_architecture": False,
        "multi_query": False,
        "alibi": False,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "olmo2": {},
    "cohere2": SLIDING,
    "glm4": {},
}


# gpt_oss has attention sinks and gemma2 a softcap, which sdpa cannot express; bloom computes its attention itself.
CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("eager", "sdpa")
    if not (attention == "sdpa" and family in ("gpt_oss", "bloom", "gemma2"))
]


def tiny_config(family: str) -> PreTrainedConfig:
    fields = {name: value for name, value in {**SMALL, **FAMILIES.get(family, {})}.items() if value is not DROP}
    return AutoConfig.for_model(family, **fields)


@cache
def tiny_model(family: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention).eval()
