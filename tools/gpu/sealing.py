"""Sealing and materializing of pages: whether they give the codec's numbers, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu import packed, timing
from gpu.plan import Plan, Shape
from gpu.work import Unit
from kvquant import QuantConfig
from kvquant.testing import relative_errors
from kvquant_evals.bench.race import label_of
from kvquant_kernels.triton.ops.materialize import materialize
from kvquant_kernels.triton.ops.seal import can_seal, seal

NAMES = ("keys", "values")
CHECKED_PAGES = 4


def units(plan: Plan, device: torch.device, copy: Callable[[], float]) -> list[Unit]:
    """A unit per format, at the first shape."""
    return [
        Unit(f"seal and materialize, {label_of(bits)}", partial(measure, plan, plan.shapes[0], bits, device, copy))
        for bits in plan.bits
    ]


def measure(plan: Plan, shape: Shape, bits: Any, device: torch.device, copy: Callable[[], float]) -> dict[str, Any]:
    """Times of sealing and materializing keys and values, with the bytes that are read and written."""
    config, layout = QuantConfig.preset(bits), packed.layout_for(shape, bits)
    records = packed.random_pool(layout, plan.pages, device).unflatten(1, (layout.num_heads, layout.head_words))
    runs: dict[str, timing.Run] = {}
    num_bytes: dict[str, int] = {}
    for i, (name, part) in enumerate(zip(NAMES, layout.parts, strict=True)):
        codec, states = config.codec(i), _random_states(shape, plan.pages, config.page_size, device)
        if can_seal(part, codec):
            runs[f"seal {name}"] = partial(seal, states, records, part, codec)
        runs[f"materialize {name}"] = partial(materialize, records, part, codec, packed.DTYPE)
        packed_bytes = 4 * plan.pages * layout.num_heads * (part.last - part.first)
        num_bytes |= {f"{verb} {name}": states.nbytes + packed_bytes for verb in ("seal", "materialize")}
    for run in runs.values():
        run()
    rows = []
    for name, found in timing.race(runs, device, plan.rounds, plan.milliseconds).items():
        per_second = num_bytes[name] / (1e-6 * found.median)
        speed = {"bytes": num_bytes[name], "bytes_per_second": per_second, "share_of_copy": per_second / copy()}
        rows.append({"what": name, **found.to_dict(), **speed})
    return {"shape": shape._asdict(), "bits": label_of(bits), "pages": plan.pages, "rounds": plan.rounds, "rows": rows}


def check(shape: Shape, bits: Any, device: torch.device) -> dict[str, Any]:
    """Whether records are the codec's bit for bit, and how far materialized states are from those of the codec."""
    config, layout = QuantConfig.preset(bits), packed.layout_for(shape, bits)
    codecs = [config.codec(i) for i in range(2)]
    states = [_random_states(shape, CHECKED_PAGES, config.page_size, device) for _ in range(2)]
    expected = layout.pack(*(codec.encode(part) for codec, part in zip(codecs, states, strict=True)))
    heads = expected.view(torch.int32).unflatten(1, (layout.num_heads, layout.head_words))
    found: dict[str, Any] = {"passed": True}
    most = 1e-4  # codes, signs and scales are exact, but matrix units cut off sums
    for i, (name, part) in enumerate(zip(NAMES, layout.parts, strict=True)):
        error = _materialized_error(heads, layout, i, codecs[i])
        found |= {f"{name}_error": error, "passed": found["passed"] and error <= most}
        if can_seal(part, codecs[i]):
            sealed = torch.zeros_like(heads)
            seal(states[i], sealed, part, codecs[i])
            wrong = int((sealed != heads)[..., part.first : part.last].sum().item())
            found |= {f"{name}_wrong_words": wrong, "passed": found["passed"] and wrong == 0}
    return found


def _materialized_error(heads: Tensor, layout: Any, i: int, codec: Any) -> float:
    """In units of the states' root mean square."""
    expected = codec.restore(codec.decode(layout.parts[i].read(heads)))
    return relative_errors(materialize(heads, layout.parts[i], codec, torch.float32), expected).rms


def _random_states(shape: Shape, pages: int, page_size: int, device: torch.device) -> Tensor:
    """[pages, Hkv, page_size, D], as pages lie in the states of one row."""
    size = shape.num_kv_heads, pages * page_size, shape.head_dim
    states: Tensor = torch.randn(size, dtype=packed.DTYPE, device=device).unflatten(1, (pages, page_size))
    return states.transpose(0, 1)
