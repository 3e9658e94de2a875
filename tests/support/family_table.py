"""Families of models: what a tiny one is made of, and what it cannot do and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from kvquant.compat import TRANSFORMERS

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
NO_HEAD_DIM = {"head_dim": DROP}
NO_GROUPS = {"head_dim": DROP, "num_key_value_heads": DROP}
OWN_NAMES = {**NO_GROUPS, "hidden_size": DROP, "intermediate_size": DROP, "num_hidden_layers": DROP,
             "num_attention_heads": DROP}  # fmt: skip
# A window that a prompt passes, and one layer of each kind.
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
SHARED = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "sliding_window": 32, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16,
}  # fmt: skip
GPT2 = {**OWN_NAMES, "max_position_embeddings": DROP, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": DROP,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16, "head_dim": DROP,
}  # fmt: skip
T5 = {**OWN_NAMES, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    **OWN_NAMES, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 448,
           "begin_suppress_tokens": None, "max_position_embeddings": DROP}  # fmt: skip
_MODULE = {**SMALL, **SLIDING, "query_pre_attn_scalar": 16}
T5GEMMA = {
    **OWN_NAMES, "max_position_embeddings": DROP, "encoder": _MODULE,
    "decoder": {**_MODULE, "cross_attention_hidden_size": 64}, "decoder_start_token_id": 1,
}  # fmt: skip


class Limit(NamedTuple):
    """What a family cannot do, with DynamicCache either.

    what: an attention, "left padding", a way to decode, or "anything".
    before: the release of transformers that lifts it; None where it holds in all.
    reason: where it holds in all, a part of the message of the error, which is checked.
    """

    what: str
    reason: str
    before: tuple[int, int] | None = None

    @property
    def holds(self) -> bool:
        return self.before is None or self.before > TRANSFORMERS


@dataclass(frozen=True)
class Family:
    """A tiny model: `fields` of its configuration beyond SMALL's, its limits, and options of its QuantCache.

    model_type: as in AutoConfig; None if it is the family's name.
    with_config: whether caches are given the model's configuration; else they take all layers for full attention.
    own_cross_cache: whether the model puts a cache of its own in place of the cross-attention cache it is given.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    model_type: str | None = None
    auto: type = AutoModelForCausalLM
    options: Mapping[str, Any] = field(default_factory=dict)
    with_config: bool = True
    own_cross_cache: bool = False

    def limit(self, *wanted: str) -> Limit | None:
        """The first limit in the way of what is wanted."""
        return next((limit for limit in self.limits if limit.holds and limit.what in (*wanted, "anything")), None)


NO_SDPA = Limit("sdpa", "does not support an attention implementation through torch.nn.functional.scaled_dot_product")
NO_INTERFACE = Limit("kvquant", "KeyError: 'kvquant'")
OWN_ATTENTION = Limit("kvquant", "computes attention by itself")
STATEFUL = Limit("prompt lookup", "assisted generation is not supported with stateful models")
OWN_CACHE = Limit("anything", "keeps its states in a cache of its own", before=(5, 5))
FORGETS = Limit("prompt lookup", "sliding windows cannot be cropped", before=(5, 15))


def new_in(*release: int) -> Limit:
    return Limit("anything", "does not exist", before=release)


def no_sdpa_before(*release: int) -> Limit:
    return Limit("sdpa", "has no sdpa", before=release)


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(SPARSE),
    "gemma": Family(),
    "phi": Family(NO_HEAD_DIM),
    "phi3": Family({"sliding_window": None, "head_dim": DROP, "original_max_position_embeddings": 1024}),
    "mixtral": Family({"sliding_window": None, **EXPERTS}),
    "olmo2": Family(NO_HEAD_DIM),
    "cohere": Family(NO_HEAD_DIM),
    "glm4": Family(),
    "granite": Family(NO_HEAD_DIM),
    "starcoder2": Family({"sliding_window": None, **NO_HEAD_DIM}),
    "smollm3": Family({"use_sliding_window": False, "no_rope_layers": [1, 0], **NO_HEAD_DIM}),
    "stablelm": Family(NO_HEAD_DIM),
    "gpt2": Family(GPT2),
    "gpt_neox": Family(NO_GROUPS),
    "gptj": Family({**GPT2, "rotary_dim": 8}, (no_sdpa_before(5, 24),)),
    "gpt_bigcode": Family(GPT2),
    "opt": Family({**NO_GROUPS, "ffn_dim": 64, "word_embed_proj_dim": 64, "do_layer_norm_before": True}),
    # Heads repeated, or split in two, by the model itself.
    "jetmoe": Family({"head_dim": DROP, "num_attention_heads": DROP, "kv_channels": 16, **EXPERTS}),
    "diffllama": Family(),
    # Attention of their own.
    "falcon": Family(
        {**NO_GROUPS, "num_kv_heads": 4, "new_decoder_architecture": False, "multi_query": False}, (NO_INTERFACE,)
    ),
    "falcon, one KV head": Family(
        {**NO_GROUPS, "new_decoder_architecture": False, "multi_query": True}, (NO_INTERFACE,), model_type="falcon"
    ),
    "gpt_neo": Family(
        {
            **NO_GROUPS,
            "num_attention_heads": DROP,
            "num_hidden_layers": DROP,
            "num_heads": 4,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 32,
        },
        (NO_SDPA, NO_INTERFACE),
    ),
    "bloom": Family({**OWN_NAMES, "hidden_size": 64, "n_head": 4, "n_layer": 2}, (NO_SDPA, OWN_ATTENTION)),
    "mpt": Family(
        {**OWN_NAMES, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024, "use_cache": True},
        (NO_SDPA, OWN_ATTENTION),
    ),
    # Sliding windows, chunks, softcap and sinks.
    "mistral": Family({"sliding_window": 32}, (FORGETS,)),
    "ministral": Family(SLIDING, (FORGETS,)),
    "gemma2": Family({**SLIDING, "query_pre_attn_scalar": 16}, (NO_SDPA, FORGETS)),
    "gemma3_text": Family({**SLIDING, "query_pre_attn_scalar": 16}, (FORGETS,)),
    "gemma3_text, no config": Family(
        {**SLIDING, "query_pre_attn_scalar": 16}, model_type="gemma3_text", with_config=False
    ),
    "cohere2": Family(SLIDING, (FORGETS,)),
    "olmo3": Family({**SLIDING, **NO_HEAD_DIM}, (FORGETS,)),
    "exaone4": Family({**SLIDING, **NO_HEAD_DIM}, (FORGETS,)),
    "llama4_text": Family(
        {
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "moe_layers": [1],
        },
        (FORGETS,),
    ),
    "gpt_oss": Family({**SLIDING, **EXPERTS}, (NO_SDPA, FORGETS)),
    # Layers that read the keys and values of others.
    "gemma3n_text": Family({**SHARED, "laurel_rank": 8, "altup_num_inputs": 2}, (FORGETS,)),
    "gemma4_text": Family({**SHARED, "global_head_dim": 32}, (new_in(5, 5), FORGETS)),
    # Latent keys and values.
    "deepseek_v2": Family({**LATENT, **ROUTED, "first_k_dense_replace": 1}),
    "deepseek_v3": Family({**LATENT, **ROUTED, "first_k_dense_replace": 1}),
    "glm4_moe_lite": Family({**LATENT, **ROUTED}),
    "minicpm3": Family(LATENT, (new_in(5, 13),)),
    # Linear attention, state spaces and convolutions.
    "qwen3_next": Family({**LINEAR, **SPARSE, "shared_expert_intermediate_size": 32}, (STATEFUL, OWN_CACHE)),
    "qwen3_5_text": Family(LINEAR, (STATEFUL, OWN_CACHE)),
    "falcon_h1": Family({**MAMBA, "mamba_d_ssm": 128}, (STATEFUL, OWN_CACHE)),
    "jamba": Family(
        {
            **NO_HEAD_DIM,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        (STATEFUL, OWN_CACHE),
    ),
    "granitemoehybrid": Family(
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
        },
        (STATEFUL, OWN_CACHE),
    ),
    "zamba2": Family(
        {
            **NO_GROUPS,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "adapter_rank": 8,
        },
        (STATEFUL, OWN_CACHE),
    ),
    "lfm2": Family(
        {**NO_HEAD_DIM, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        (OWN_CACHE, Limit("prompt lookup", "is stateful", before=(5, 15))),
    ),
    "minimax": Family(
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 16},
        (Limit("anything", "uses cache of its own"),),
    ),
    # Encoders with decoders.
    "t5": Family(T5, (no_sdpa_before(5, 15),), auto=AutoModelForSeq2SeqLM),
    "bart": Family(BART, auto=AutoModelForSeq2SeqLM),
    "marian": Family(BART, auto=AutoModelForSeq2SeqLM),
    "whisper": Family(WHISPER, auto=AutoModelForSpeechSeq2Seq),
    "t5gemma": Family(T5GEMMA, (NO_SDPA, FORGETS), auto=AutoModelForSeq2SeqLM, own_cross_cache=True),
}
