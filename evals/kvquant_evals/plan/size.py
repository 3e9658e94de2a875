"""The bytes of a cache at some context and batch: the size equation, and what pages and exact tokens take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from kvquant import MemoryReport, QuantCache, QuantConfig
from kvquant import kernel as kernels
from kvquant.layer import QuantLayer
from kvquant.layout import PageLayout, PlainLayout
from kvquant.pages import page_parts
from kvquant.window import Window
from kvquant_evals.plan.architecture import Architecture, Heads, LayerShape


class Workload(NamedTuple):
    """What a cache is to hold: `batch` rows of `tokens` each, whose first `shared` ones are the same, and kept once."""

    tokens: int
    batch: int
    shared: int = 0


class Term(NamedTuple):
    """One term of the size equation: layers that keep the same, at full precision. Its factors multiply to `size`.

    key and value are None for other states than these: `state_bytes` per row, or per token where `tokens` is not 1.
    """

    kind: str
    layers: int
    key: Heads | None
    value: Heads | None
    itemsize: int
    tokens: int
    batch: int
    state_bytes: int = 0

    @property
    def size(self) -> int:
        if self.key is None or self.value is None:
            return self.layers * self.state_bytes * self.tokens * self.batch
        return self.layers * (self.key.numbers + self.value.numbers) * self.itemsize * self.tokens * self.batch

    def __str__(self) -> str:
        """The factors, in words."""
        if self.key is None or self.value is None:
            per_token = f" x {self.tokens:,} tokens" if self.tokens > 1 else ""
            return f"{self.layers} layers x {self.state_bytes:,} bytes of states{per_token} x batch {self.batch}"
        end = f"{self.itemsize} bytes x {self.tokens:,} tokens x batch {self.batch}"
        if self.key == self.value:
            heads = f"{self.key.heads} KV heads x head_dim {self.key.head_dim}"
            return f"2 x {self.layers} layers x {heads} x {end}"
        parts = f"{self.key.heads} x {self.key.head_dim} + {self.value.heads} x {self.value.head_dim}"
        return f"{self.layers} layers x ({parts}) x {end}"


def equation(architecture: Architecture, workload: Workload) -> list[Term]:
    """The terms of the size equation at full precision, in the order of the layers."""
    tokens, batch = workload.tokens, workload.batch
    terms = []
    for shape, count in Counter(architecture.layers).items():
        itemsize = shape.dtype.itemsize
        if shape.token_bytes:
            visible = shape.visible(tokens)
            terms.append(Term(shape.kind, count, shape.key, shape.value, itemsize, visible, batch))
        if shape.state_bytes:
            terms.append(Term(f"{shape.kind}, states", count, None, None, itemsize, 1, batch, shape.state_bytes))
        if shape.state_token_bytes:
            kind = f"{shape.kind}, states by the token"
            terms.append(Term(kind, count, None, None, itemsize, tokens, batch, shape.state_token_bytes))
    return terms


@dataclass(frozen=True)
class StoredLayer:
    """A layer as a cache keeps it: packed in pages of this layout, or as transformers does if `packing` is None."""

    shape: LayerShape
    packing: tuple[QuantConfig, PageLayout] | None = None

    def memory(self, workload: Workload) -> MemoryReport:
        """What QuantCache.memory() says of it once the tokens have come one by one."""
        return self._plain_memory(workload) if self.packing is None else self._packed_memory(workload, *self.packing)

    def _plain_memory(self, workload: Workload) -> MemoryReport:
        shape, (tokens, batch, _) = self.shape, workload
        row = shape.visible(tokens) * shape.token_bytes + shape.state_bytes + shape.state_token_bytes * tokens
        return MemoryReport(unquantized=batch * row, full_precision=batch * row)

    def _packed_memory(self, workload: Workload, quant: QuantConfig, layout: PageLayout) -> MemoryReport:
        shape, (tokens, batch, _) = self.shape, workload
        held, shared = self._pages(workload, quant)
        pages = shared + batch * (len(held) - shared)
        visible = batch * shape.visible(tokens)
        return MemoryReport(
            codes=pages * layout.code_bytes,
            scales=pages * (layout.page_bytes - layout.code_bytes),
            exact=batch * (tokens - held.stop * quant.page_size) * shape.token_bytes,
            page_tables=4 * batch * len(held),
            elements=visible * shape.token_bytes // shape.dtype.itemsize,
            full_precision=visible * shape.token_bytes,
        )

    def _pages(self, workload: Workload, quant: QuantConfig) -> tuple[range, int]:
        """Of a row the sealed pages that it still holds, counted from its start, and how many of them are shared."""
        sealed = _sealed(workload.tokens, quant)
        held = range(self._first_page(sealed, quant), sealed)
        shared = _sealed(min(workload.shared, workload.tokens), quant)
        return held, max(0, min(shared, held.stop) - held.start)

    def _first_page(self, sealed: int, quant: QuantConfig) -> int:
        """The first page that a row keeps. What has left the window is forgotten just before a page is sealed."""
        if self.shape.window is None:
            return 0
        hidden = Window(self.shape.window).hidden(_length_when_sealed(sealed, quant))
        return max(0, min((hidden - quant.sinks) // quant.page_size, sealed - 2))


@dataclass(frozen=True)
class Storage:
    """All layers of a model as a cache keeps them, equal ones together.

    quant: tells at which lengths pages are sealed, in all layers alike; between them a cache only grows.
    """

    layers: tuple[tuple[StoredLayer, int], ...]
    quant: QuantConfig

    @staticmethod
    def of(architecture: Architecture, quant: QuantConfig | None, device_type: str = "cuda") -> Storage:
        """How QuantCache stores a model with `quant`, or DynamicCache if that is None."""
        counted = Counter(_stored(architecture, quant))
        layers = [
            (StoredLayer(shape, None if own is None else (own, page_layout(shape, own, device_type))), count)
            for (shape, own), count in counted.items()
        ]
        return Storage(tuple(layers), quant or QuantConfig())

    def memory(self, workload: Workload) -> MemoryReport:
        """What `memory()` of the cache says, once all tokens are there."""
        return sum((_times(layer.memory(workload), count) for layer, count in self.layers), MemoryReport())

    def peak(self, workload: Workload) -> int:
        """The most bytes that are held on the way there: some more just before a page is sealed."""
        sealed = _sealed(workload.tokens, self.quant)
        before = self.last_length(sealed - 1) if sealed else workload.tokens
        return max(self.memory(workload._replace(tokens=tokens)).total for tokens in {workload.tokens, before})

    def last_length(self, pages: int) -> int:
        """The most tokens of a row with that many sealed pages."""
        return _length_when_sealed(pages + 1, self.quant) - 1


def page_layout(shape: LayerShape, quant: QuantConfig, device_type: str) -> PageLayout:
    """The layout of a layer's pages: on the CPU the one that is used here, on a GPU that of triton's kernels."""
    states = shape.states()
    assert states is not None
    parts = page_parts(quant, *states)
    if device_type == "cpu":
        return kernels.choose_layout(*parts, torch.device("cpu"))
    wanted = [] if kernels.is_switched_off() else kernels.discover()
    layouts = (found.page_layout(*parts) for found in wanted if found.device_type == device_type)
    return next((layout for layout in layouts if not isinstance(layout, str)), PlainLayout(*parts))


def _stored(architecture: Architecture, quant: QuantConfig | None) -> Iterator[tuple[LayerShape, QuantConfig | None]]:
    """Every layer with how it is packed; None if it is not."""
    if quant is None:
        yield from ((shape, None) for shape in architecture.layers)
        return
    cache = QuantCache(config=architecture.config, quant=quant)
    for layer, shape in zip(cache.layers, architecture.layers, strict=True):
        yield shape, _packing(layer, shape)


def _packing(layer: Any, shape: LayerShape) -> QuantConfig | None:
    states = shape.states()
    if states is None or not isinstance(layer, QuantLayer):
        return None
    layer.lazy_initialization(*states)  # only then it is known what of latents stays exact
    return layer.stored_as


def _sealed(tokens: int, quant: QuantConfig) -> int:
    """The pages that a row of `tokens` has sealed."""
    return max(0, (tokens - quant.sinks - quant.residual_length) // quant.page_size)


def _length_when_sealed(pages: int, quant: QuantConfig) -> int:
    """The tokens with which a row seals its last of `pages` pages."""
    return quant.sinks + quant.residual_length + pages * quant.page_size


def _times(report: MemoryReport, count: int) -> MemoryReport:
    return MemoryReport(*(count * getattr(report, field.name) for field in fields(report)))
