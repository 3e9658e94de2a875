"""Published layouts as configurations of our own cache: the same pages, bytes and attention, other formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import Cache

from kvquant import QuantCache, QuantConfig, QuantFormat, formats
from kvquant.codec import StateCodec
from kvquant.formats import Clip, largest_divisor
from kvquant_evals.model import Subject
from kvquant_evals.peers.peer import Peer

_OURS = QuantConfig()


@dataclass(frozen=True)
class KeysRotated(QuantConfig):
    """A configuration whose keys are rotated and whose values are not."""

    def codec(self, part: int) -> StateCodec:
        codec = super().codec(part)
        return codec if part == 0 else replace(codec, rotated=False)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"rotation": "keys"}


@dataclass(frozen=True)
class Layout:
    """A published layout. at: its configuration for a head_dim; windowed: with our sinks and exact window instead."""

    at: Callable[[int], QuantConfig]
    windowed: bool = False

    def missing(self) -> str | None:
        return None

    def new_cache(self, subject: Subject) -> Cache:
        return QuantCache(quant=self.quant(subject), config=subject.model.config)

    def quant(self, subject: Subject) -> QuantConfig:
        config = subject.model.config.get_text_config(decoder=True)
        quant = self.at(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return _with_window(quant) if self.windowed else quant


@dataclass(frozen=True)
class Inexpressible:
    """A layout that our formats cannot hold, and why."""

    reason: str

    def missing(self) -> str | None:
        return self.reason

    def new_cache(self, subject: Subject) -> Cache:
        raise NotImplementedError(self.reason)

    def quant(self, subject: Subject) -> QuantConfig | None:
        raise NotImplementedError(self.reason)


def _with_window(quant: QuantConfig) -> QuantConfig:
    """With our sinks and most recent tokens. Pages stay what they are where they are the groups of channels."""
    is_grouped = "per_channel" in (quant.key.granularity, quant.value.granularity)
    page_size = quant.page_size if is_grouped else _OURS.page_size
    return replace(quant, sinks=_OURS.sinks, residual_length=_OURS.residual_length, page_size=page_size)


def _same(fmt: QuantFormat, group_size: int, *, rotation: bool) -> QuantConfig:
    """One format per token for keys and values, with nothing exact but what does not fill the smallest page."""
    fmt = replace(fmt, group_size=group_size)
    return QuantConfig(key=fmt, value=fmt, sinks=0, residual_length=0, page_size=8, rotation=rotation)


def _kivi(bits: int) -> Layout:
    def at(head_dim: int) -> QuantConfig:
        value = replace(formats.integer_format(bits, "per_token"), group_size=largest_divisor(head_dim, at_most=32))
        key = formats.integer_format(bits, "per_channel")
        return QuantConfig(key=key, value=value, sinks=0, residual_length=128, page_size=32, rotation=False)

    return Layout(at)


def _saw(head_dim: int) -> QuantConfig:
    fmt = replace(formats.INT4_PER_TOKEN, group_size=head_dim)
    return KeysRotated(key=fmt, value=fmt, sinks=0, residual_length=0, page_size=8)


def _rotated(bits: int, clip: Clip) -> Layout:
    fmt = replace(formats.integer_format(bits, "per_token"), clip=clip)
    return Layout(lambda head_dim: _same(fmt, head_dim, rotation=True))


def _llama_cpp(fmt: QuantFormat) -> Layout:
    """Blocks of 32; since #21038 keys and values are rotated where head_dim is a multiple of 64."""
    return Layout(lambda head_dim: _same(fmt, largest_divisor(head_dim, at_most=32), rotation=head_dim % 64 == 0))


def _per_head(fmt: QuantFormat, *, rotation: bool = False) -> Layout:
    return Layout(lambda head_dim: _same(fmt, head_dim, rotation=rotation))


_KIVI = (
    "KIVI (Liu et al., 2024)",
    "keys per channel and values per token in groups of 32; the last 128 exact",
)
_KIVI_DIFFERS = "the last 128 to 159 tokens are exact; KIVI keeps 0 to 127 keys and 128 values"
_TURBOQUANT = (
    "TurboQuant (Zandieh et al., 2025), its variant for squared error",
    "keys and values rotated, one group per token and head; nothing exact",
)
_TURBOQUANT_DIFFERS = (
    "a uniform grid with searched range instead of a norm and the Lloyd-Max codebook (no more squared error on normal "
    "data, 16 bits more per group), a Hadamard instead of a random rotation, no bits for outlier channels"
)
_LLAMA_CPP = "llama.cpp (Gerganov et al., 2023; rotated since pull request 21038, 2026)"
_LLAMA_CPP_DIFFERS = "values of heads beyond 64 channels are rotated as a whole instead of by 64 channels"
_VLLM_DIFFERS = "scales of 16 bits instead of 32"

_PUBLISHED: tuple[Peer, ...] = (
    Peer("kivi-4", "KIVI 4", _KIVI[0], f"4 bit, {_KIVI[1]}", _kivi(4), _KIVI_DIFFERS),
    Peer("kivi-2", "KIVI 2", _KIVI[0], f"2 bit, {_KIVI[1]}", _kivi(2), _KIVI_DIFFERS),
    Peer(
        "quarot-4",
        "QuaRot KV 4",
        "QuaRot (Ashkboos et al., 2024)",
        "4 bit, keys and values rotated, one group per token and head that covers .95 of its range; nothing exact",
        _rotated(4, Clip((0.95,))),
        "only the cache; QuaRot quantizes weights and activations as well",
    ),
    Peer(
        "saw-int4",
        "SAW-INT4",
        "SAW-INT4 (Jia et al., 2026)",
        "4 bit, one group per token and head, keys rotated and values not; nothing exact",
        Layout(_saw),
    ),
    Peer(
        "turboquant-4", "TurboQuant 4 (uniform grid)",
        _TURBOQUANT[0], f"4 bit, {_TURBOQUANT[1]}", _rotated(4, Clip(norm=2.0)), _TURBOQUANT_DIFFERS,
    ),
    Peer(
        "turboquant-3", "TurboQuant 3 (uniform grid)",
        _TURBOQUANT[0], f"3 bit, {_TURBOQUANT[1]}", _rotated(3, Clip(norm=2.0)), _TURBOQUANT_DIFFERS,
    ),
    Peer(
        "llama-cpp-q8_0",
        "llama.cpp q8_0",
        _LLAMA_CPP,
        "symmetric 8 bit in blocks of 32 channels, rotated if head_dim is a multiple of 64; nothing exact",
        _llama_cpp(formats.INT8_PER_TOKEN_SYMMETRIC),
        _LLAMA_CPP_DIFFERS,
    ),
    Peer(
        "llama-cpp-q4_0",
        "llama.cpp q4_0 (15 levels)",
        _LLAMA_CPP,
        "symmetric 4 bit in blocks of 32 channels, rotated if head_dim is a multiple of 64; nothing exact",
        _llama_cpp(formats.INT4_PER_TOKEN_SYMMETRIC),
        f"levels -7 to 7 instead of -8 to 7, 1.28 times the squared error on normal data; {_LLAMA_CPP_DIFFERS}",
    ),
    Peer(
        "vllm-int8",
        "vLLM int8 per token and head",
        "vLLM (pull request 38378, 2026)",
        "symmetric 8 bit, one group per token and head; nothing exact",
        _per_head(formats.INT8_PER_TOKEN_SYMMETRIC),
        _VLLM_DIFFERS,
    ),
    Peer(
        "vllm-fp8",
        "vLLM fp8 per token and head",
        "vLLM (pull request 38378, 2026)",
        "e4m3, one scale per token and head; nothing exact",
        _per_head(formats.FP8_E4M3_PER_TOKEN),
        _VLLM_DIFFERS,
    ),
    Peer(
        "vllm-int4",
        "vLLM int4 per token and head",
        "vLLM (pull request 40835, 2026)",
        "4 bit, keys and values rotated, one group per token and head; nothing exact",
        _per_head(formats.INT4_PER_TOKEN, rotation=True),
        "zero points of 16 bits instead of 4, and a Hadamard rotation without signs",
    ),
)  # fmt: skip

_LEFT_OUT: tuple[Peer, ...] = (
    Peer(
        "oscar",
        "OSCAR",
        "OSCAR (2026)",
        "2 bit per token in a basis fitted to the covariance of queries, 64 sinks, last 256 exact",
        Inexpressible("its basis is fitted to queries of a calibration set, and a cache sees no queries"),
    ),
)


def _windowed(peer: Peer) -> Peer:
    """The same layout with our sinks and exact window, so that only formats differ."""
    assert isinstance(peer.recipe, Layout)
    return replace(
        peer,
        name=f"{peer.name}+window",
        label=f"{peer.label} + sinks {_OURS.sinks}, last {_OURS.residual_length}",
        what=f"as {peer.name}, but with the first {_OURS.sinks} and the last {_OURS.residual_length} tokens exact",
        recipe=replace(peer.recipe, windowed=True),
        differs="",
    )


LAYOUTS: tuple[Peer, ...] = (
    *(twin for peer in _PUBLISHED for twin in (peer, _windowed(peer))),
    *_LEFT_OUT,
)
