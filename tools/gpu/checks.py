"""Checks of kernels on the device: decoding, sealing and materializing at sizes that are timed, and graph replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu import packed, sealing, timing
from gpu.baseline import TILINGS, decode_bf16
from gpu.contenders import Bf16States
from gpu.plan import Plan, Shape
from kvquant import QuantConfig
from kvquant.testing import relative_errors
from kvquant_evals.bench.race import label_of
from kvquant_kernels.triton.ops.decode import decode

Check = Callable[[], dict[str, Any]]


def tolerance(bits: Any) -> float:
    """Of the root mean square. bfloat16 rounds products with scales to 2^-9; float16, of 8-bit codes, to 2^-12."""
    config = QuantConfig.preset(bits)
    return 1e-3 if min(config.key.bits, config.value.bits) == 8 else 6e-3


def checks(plan: Plan, device: torch.device) -> dict[str, Check]:
    """All checks by name, each of which compiles kernels of its own."""
    found: dict[str, Check] = {}
    for bits in plan.bits:
        found[f"decode, {label_of(bits)}"] = partial(check_decode, plan, bits, device)
    for bits in plan.bits:
        found[f"seal and materialize, {label_of(bits)}"] = partial(sealing.check, plan.shapes[0], bits, device)
    found["decode, bf16 baseline"] = partial(check_baseline, plan, device)
    return found


def check_decode(plan: Plan, bits: Any, device: torch.device) -> dict[str, Any]:
    """The kernel against the definition on the same codes, at every shape."""
    errors = {}
    for shape in plan.shapes:
        held = packed.operands(shape, bits, 2, min(plan.contexts), device)
        errors[shape.name] = relative_errors(decode(held, torch.float32), packed.definition(held, bits)).rms
    return {"passed": all(error <= tolerance(bits) for error in errors.values()), "relative_error": errors}


def check_baseline(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Every tiling of the bfloat16 kernel against the definition. It rounds attention weights to bfloat16."""
    errors = {}
    for shape in plan.shapes:
        states = Bf16States(shape, 2, min(plan.contexts) - 3, device)
        expected = packed.plain_attention(states.query, states.key, states.value, states.scale)
        for tiling in TILINGS:
            inputs = states.query, states.key, states.value, states.lengths, states.scale
            out = decode_bf16(*inputs, tiling, torch.float32)
            errors[f"{shape.name}, {tiling}"] = relative_errors(out, expected).rms
    return {"passed": all(error <= 6e-3 for error in errors.values()), "relative_error": errors}


def check_replay(shape: Shape, bits: Any, context: int, device: torch.device) -> dict[str, Any]:
    """Whether a graph captured at one length is right at others, longer and shorter ones, with pages elsewhere."""
    held = packed.operands(shape, bits, 2, context, device)
    most = held.tables.slots.shape[1]
    before = -(-most // 2)
    packed.set_length(held, before, 70)
    replay = timing.captured(partial(decode, held, torch.float32), device)
    errors, differing = {}, 0
    for num_pages, tail in ((before, 70), (most, 101), (1, 1)):
        packed.set_length(held, num_pages, tail)
        order = torch.randperm(held.tables.slots.numel(), device=device)
        held.tables.slots.copy_(held.tables.slots.flatten()[order].view_as(held.tables.slots))
        out, fresh = replay().clone(), decode(held, torch.float32)
        differing += int((out != fresh).sum().item())
        errors[f"{num_pages} pages, tail {tail}"] = relative_errors(out, packed.definition(held, bits)).rms
    passed = differing == 0 and all(error <= tolerance(bits) for error in errors.values())
    return {"passed": passed, "captured_pages": before, "differing_numbers": differing, "relative_error": errors}
