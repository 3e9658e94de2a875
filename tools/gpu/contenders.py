"""Ways to attend to the states of one decoding step: our kernels on packed pages, and others on bfloat16 states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import packed, timing
from gpu.baseline import TILINGS, Tiling, decode_bf16
from gpu.plan import Shape
from gpu.work import made
from kvquant_evals.bench.race import label_of
from kvquant_kernels.triton.ops.decode import decode

TRITON = "triton bf16"
FLASHINFER = "flashinfer bf16"
FLASHINFER_PAGE = 16


@dataclass(frozen=True)
class Contender:
    """What runs one step, and what that reads.

    definition: the output in float64 on the same states; note: what else there is to say of it.
    """

    run: Callable[[], Tensor]
    num_bytes: int
    definition: Callable[[], Tensor]
    is_packed: bool
    note: str = ""


def packed_contender(shape: Shape, bits: Any, batch: int, context: int, device: torch.device) -> Contender:
    held = packed.operands(shape, bits, batch, context, device)
    return Contender(
        partial(decode, held, packed.DTYPE), packed.bytes_read(held), partial(packed.definition, held, bits), True
    )


class Bf16States:
    """Keys and values of a batch of equally long rows, contiguous, and one query each."""

    def __init__(self, shape: Shape, batch: int, context: int, device: torch.device) -> None:
        size = batch, shape.num_kv_heads, context, shape.head_dim
        self.key, self.value = (torch.randn(size, dtype=packed.DTYPE, device=device) for _ in range(2))
        self.query = torch.randn(batch, shape.num_heads, 1, shape.head_dim, dtype=packed.DTYPE, device=device)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.scale = shape.head_dim**-0.5

    def makers(self, milliseconds: float) -> dict[str, Callable[[], Contender]]:
        """All contenders that there may be, by label; what cannot be made here raises."""
        sdpa = {
            "sdpa flash bf16, enable_gqa": (SDPBackend.FLASH_ATTENTION, False),
            "sdpa flash bf16, packed heads": (SDPBackend.FLASH_ATTENTION, True),
            "sdpa cudnn bf16, enable_gqa": (SDPBackend.CUDNN_ATTENTION, False),
        }
        by_torch = {label: partial(self._contender, partial(self._sdpa, *how)) for label, how in sdpa.items()}
        return {TRITON: partial(self._triton, milliseconds), **by_torch, FLASHINFER: self._flashinfer}

    def _contender(self, run: Callable[[], Tensor], note: str = "") -> Contender:
        states = self.query, self.key, self.value
        num_bytes = self.key.nbytes + self.value.nbytes + 2 * self.query.nbytes
        return Contender(run, num_bytes, partial(packed.plain_attention, *states, self.scale), False, note)

    def _triton(self, milliseconds: float) -> Contender:
        """Our bfloat16 kernel with the tiling that is fastest here."""
        runs = {str(tiling): partial(self._tiled, tiling) for tiling in TILINGS}
        why_not: dict[str, str] = {}
        graphs = made({label: partial(timing.captured, run, self.query.device) for label, run in runs.items()}, why_not)
        found = timing.race(graphs, self.query.device, 1, milliseconds / 2)
        if not found:
            raise RuntimeError(str(why_not))
        best = min(found, key=lambda label: found[label].median)
        return self._contender(runs[best], best)

    def _tiled(self, tiling: Tiling) -> Tensor:
        return decode_bf16(self.query, self.key, self.value, self.lengths, self.scale, tiling, packed.DTYPE)

    def _sdpa(self, backend: SDPBackend, is_packed: bool) -> Tensor:
        """torch's attention; with packed heads, the query heads of a KV head are its queries."""
        query = self.query.view(*self.key.shape[:2], -1, self.key.shape[3]) if is_packed else self.query
        with sdpa_kernel(backend):
            states = query, self.key, self.value
            out = F.scaled_dot_product_attention(*states, scale=self.scale, enable_gqa=not is_packed)
        return out.view_as(self.query)

    def _flashinfer(self) -> Contender:
        """FlashInfer's batch decoding over pages in order; a copy of the states."""
        import flashinfer

        batch, heads, tokens, dim = self.key.shape
        pages, device = tokens // FLASHINFER_PAGE, self.key.device
        paged = tuple(
            part.unflatten(2, (pages, FLASHINFER_PAGE)).transpose(1, 2).flatten(0, 1).contiguous()
            for part in (self.key, self.value)
        )  # [B * pages, Hkv, page, D]
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32, device=device) * pages,
            torch.arange(batch * pages, dtype=torch.int32, device=device),
            torch.full((batch,), FLASHINFER_PAGE, dtype=torch.int32, device=device),
            self.query.shape[1], heads, dim, FLASHINFER_PAGE,
            sm_scale=self.scale, q_data_type=packed.DTYPE, kv_data_type=packed.DTYPE,
        )  # fmt: skip
        query = self.query.squeeze(2)
        return self._contender(lambda: wrapper.run(query, paged).unsqueeze(2))


def packed_makers(
    shape: Shape, bits: tuple[Any, ...], batch: int, context: int, device: torch.device
) -> dict[str, Callable[[], Contender]]:
    """Ours, by label."""
    return {label_of(b): partial(packed_contender, shape, b, batch, context, device) for b in bits}
