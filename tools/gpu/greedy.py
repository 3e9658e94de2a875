"""Whether a model chooses the same tokens with the kernels as with plain PyTorch on the same codes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gpu.plan import Plan
from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT
from kvquant.kernel import SWITCH
from kvquant.testing import relative_errors
from kvquant_evals.bench.race import label_of

# Of the root mean square of logits. Rounding to bfloat16 alone gives 1e-2 as soon as any number of the model differs.
TOLERANCE = 4e-2


def tiny_model(device: torch.device) -> PreTrainedModel:
    """A llama of two layers with random weights in bfloat16."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, initializer_range=0.1,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model.to(device)


def compare(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Greedy tokens without kernels, and what a model with kernels would have chosen after each of them."""
    torch.manual_seed(0)
    model = tiny_model(device)
    prompt = torch.randint(512, (2, plan.prompt), device=device)
    formats = {label_of(bits): _compare_format(plan, model, prompt, bits) for bits in plan.bits}
    return {"passed": all(row["passed"] for row in formats.values()), "prompt": plan.prompt, "formats": formats}


def _compare_format(plan: Plan, model: PreTrainedModel, prompt: Tensor, bits: Any) -> dict[str, Any]:
    with mock.patch.dict(os.environ, {SWITCH: "off"}):
        expected = _logits(model, prompt, bits, plan.tokens)
    chosen = expected.argmax(-1)
    logits = _logits(model, prompt, bits, plan.tokens, chosen)
    same = logits.argmax(-1) == chosen
    best = expected.topk(2, dim=-1).values
    margin = ((best[..., 0] - best[..., 1]) / expected.square().mean().sqrt())[~same]
    error = relative_errors(logits, expected).rms
    return {
        "passed": error <= TOLERANCE,
        "tokens": same.numel(),
        "same_tokens": int(same.sum().item()),
        "logits_error": error,
        # By how much the reference preferred its token where another was chosen.
        "largest_margin_of_others": margin.max().item() if margin.numel() else 0.0,
    }


def _logits(model: PreTrainedModel, prompt: Tensor, bits: Any, steps: int, tokens: Tensor | None = None) -> Tensor:
    """Logits float32 [B, steps, vocabulary] of a prompt followed by `tokens` [B, steps], or by the likeliest ones."""
    cache, ids, found = QuantCache(bits=bits, config=model.config), prompt, []
    with torch.inference_mode():
        for i in range(steps):
            out: Any = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
            found.append(out.logits.float())
            ids = (out.logits.argmax(-1) if tokens is None else tokens[:, i : i + 1]).contiguous()
    return torch.cat(found, dim=1)
