"""Packed states made of random words: what kernels are timed on, and the definition of attention on the same codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu.plan import Shape
from kvquant import QuantConfig
from kvquant.formats import FloatGrid
from kvquant.layout import PagePart, StateShape
from kvquant_kernels.triton.attend import Operands, RowTables
from kvquant_kernels.triton.layout import PartLayout, TritonLayout

DTYPE = torch.bfloat16
NO_NAN = -0x01010102  # 0xFEFEFEFE: of the codes of e4m3 only those with all bits set are NaN


def layout_for(shape: Shape, bits: Any) -> TritonLayout:
    config = QuantConfig.preset(bits)
    state = StateShape(shape.num_kv_heads, config.page_size, shape.head_dim)
    return TritonLayout(*(PagePart(fmt, state, DTYPE) for fmt in (config.key, config.value)))


def random_pool(layout: TritonLayout, num_pages: int, device: torch.device) -> Tensor:
    """Pages int32 [num_pages, words of a page] of random codes, whose scales make states of about -1 to 1."""
    words = layout.num_heads * layout.head_words
    pool = torch.randint(-(2**31), 2**31 - 1, (num_pages, words), dtype=torch.int32, device=device)
    heads = pool.unflatten(1, (layout.num_heads, layout.head_words))
    for part in layout.parts:
        if isinstance(part.fmt.grid, FloatGrid):
            heads[..., part.first : part.scales] &= NO_NAN
        heads[..., part.scales : part.last] = _random_scales(part, heads[..., part.scales : part.last])
    return pool


def _random_scales(part: PartLayout, like: Tensor) -> Tensor:
    """int32 like `like`: pairs of float16 scales and zero points."""
    scale = (torch.rand(like.shape, device=like.device) * 0.5 + 0.5) / part.fmt.grid.half_width
    zero = torch.rand(like.shape, device=like.device) * (0.0 if part.fmt.symmetric else 0.2)
    return torch.stack((scale, zero), dim=-1).to(torch.float16).view(torch.int32).squeeze(-1)


def operands(shape: Shape, bits: Any, batch: int, context: int, device: torch.device) -> Operands:
    """One token's attention over `context` tokens in each row, itself included; pages lie in the pool in any order."""
    config, layout = QuantConfig.preset(bits), layout_for(shape, bits)
    num_pages = pages_of(config, context)
    exact = context - 1 - num_pages * config.page_size
    room = config.sinks + config.residual_length + config.page_size

    def states(tokens: int) -> tuple[Tensor, Tensor]:
        size = batch, shape.num_kv_heads, tokens, shape.head_dim
        return torch.randn(size, dtype=DTYPE, device=device), torch.randn(size, dtype=DTYPE, device=device)

    slots = torch.randperm(batch * num_pages, device=device).to(torch.int32).view(batch, num_pages)
    return Operands(
        layout=layout,
        query=torch.randn(batch, shape.num_heads, 1, shape.head_dim, dtype=DTYPE, device=device),
        pool=random_pool(layout, batch * num_pages, device),
        tables=RowTables(torch.tensor([[0, num_pages]] * batch, dtype=torch.int32, device=device), slots),
        lengths=torch.tensor([context - 1, exact - config.sinks, 0, 1], dtype=torch.int32, device=device),
        sinks=states(config.sinks),
        tail=states(room),
        chunk=states(1),
        num_sinks=config.sinks,
        rotated=(config.codec(0).rotated, config.codec(1).rotated),
        scale=shape.head_dim**-0.5,
    )


def pages_of(config: QuantConfig, context: int) -> int:
    """Pages of a row that holds `context` tokens. Raises ValueError if it would have none."""
    found = (context - 1 - config.sinks - config.residual_length) // config.page_size
    if found < 1:
        raise ValueError(f"context={context} leaves no page; give more tokens")
    return found


def set_length(held: Operands, num_pages: int, tail_length: int) -> None:
    """Gives all rows so many pages and tokens in the tail, in place, as a captured graph has to find them."""
    config = QuantConfig()
    settled = held.num_sinks + num_pages * config.page_size + tail_length
    held.tables.rows[:, 1] = num_pages
    held.lengths.copy_(torch.tensor([settled, tail_length, 0, 1], dtype=torch.int32))


def bytes_read(held: Operands) -> int:
    """Bytes of packed pages, exact states, query and output, each once."""
    pages = held.tables.rows[:, 1].sum().item() * held.pool.shape[1] * held.pool.element_size()
    per_token = sum(part.nbytes // part.shape[2] for part in held.tail)
    exact = held.num_sinks + held.lengths[1].item() + held.lengths[3].item()
    return int(pages + exact * per_token + 2 * held.query.nbytes)


def definition(held: Operands, bits: Any) -> Tensor:
    """Attention in float64 on the dequantized states, in one piece: [B, Hq, 1, D]. Rows are equally long."""
    key, value = (_states(held, bits, part) for part in (0, 1))
    return plain_attention(held.query, key, value, held.scale)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(query keys) values in float64: [B, Hq, Q, D]"""
    grouped = query.double().unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, Hkv, n_rep * Q, D]
    weights = (grouped @ key.double().transpose(-1, -2) * scale).softmax(dim=-1)
    out: Tensor = weights @ value.double()
    return out.view_as(query)


def _states(held: Operands, bits: Any, part: int) -> Tensor:
    """Keys (part 0) or values (part 1) of all tokens in the model's basis, float64 [B, Hkv, T, D]."""
    num_pages = int(held.tables.rows[0, 1].item())
    slots = held.tables.slots[:, :num_pages].flatten().long()
    codec = QuantConfig.preset(bits).codec(part)
    packed = held.layout.unpack(held.pool[slots].view(torch.uint8), part)
    pages = codec.restore(codec.decode(packed)).double()  # [B * pages, Hkv, page_size, D]
    joined = pages.unflatten(0, (-1, num_pages)).transpose(1, 2).flatten(2, 3)
    tail = held.tail[part][:, :, : int(held.lengths[1].item())]
    return torch.cat((held.sinks[part].double(), joined, tail.double(), held.chunk[part].double()), dim=2)
