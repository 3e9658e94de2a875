"""Published layouts that our formats cannot hold, simulated: their values are like for like, their speed is not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import Cache

from kvquant import QuantConfig
from kvquant_evals.model import Subject
from kvquant_evals.peers.peer import Peer
from kvquant_evals.peers.simulated_cache import Plan, SimulatedCache
from kvquant_evals.peers.simulated_kitty import kitty
from kvquant_evals.peers.simulated_kvarn import kvarn
from kvquant_evals.peers.simulated_kvquant import kvquant

_OURS = QuantConfig()
_ONLY_VALUES = "only its values are simulated, and its bytes counted from its formats"


@dataclass(frozen=True)
class Simulated:
    """A layout whose values and bytes are simulated."""

    plan: Plan

    def missing(self) -> str | None:
        return None

    def new_cache(self, subject: Subject) -> Cache:
        return SimulatedCache(self.plan, subject.model.config)

    def quant(self, subject: Subject) -> QuantConfig | None:  # noqa: ARG002  # the protocol of a recipe
        return None


def _peer(name: str, label: str, source: str, what: str, plan: Plan, differs: str = "") -> tuple[Peer, Peer]:
    """The published layout, and the same with our sinks and exact window, so that only formats differ."""
    differs = f"{differs}; {_ONLY_VALUES}" if differs else _ONLY_VALUES
    published = Peer(name, f"{label} (simulated)", source, what, Simulated(plan), differs)
    window = _OURS.residual_length
    return published, replace(
        published,
        name=f"{name}+window",
        label=f"{label} + sinks {_OURS.sinks}, last {window} (simulated)",
        what=f"as {name}, but with the first {_OURS.sinks} and the last {window} tokens exact",
        recipe=Simulated(replace(plan, sinks=_OURS.sinks, key_window=window, value_window=window)),
    )


def _kvquant(bits: int) -> tuple[Peer, Peer]:
    return _peer(
        f"kvquant-nuq{bits}",
        f"KVQuant nuq{bits}-1%",
        "KVQuant (Hooper et al., 2024)",
        f"{bits} bit from a fitted codebook, keys per channel and values per token with all heads; the 1 % of "
        "each that is farthest out and the first token exact",
        kvquant(bits),
        "keys after RoPE instead of before it; ranges and codebooks are fitted to each tile of 200 tokens, which stay "
        "exact until it is full, and stored with it, instead of fitted to a calibration set; no Fisher weights",
    )


def _kvarn(key_bits: int, value_bits: int) -> tuple[Peer, Peer]:
    return _peer(
        f"kvarn-k{key_bits}v{value_bits}",
        f"KVarN K{key_bits}V{value_bits}",
        "KVarN (Muller et al., 2026)",
        f"keys in {key_bits} bit per channel and values in {value_bits} per token, rotated and divided by scales that "
        "even out tokens and channels of a tile of 128 tokens; the first tile and the one that is not full exact",
        kvarn(key_bits, value_bits),
    )


def _kitty(name: str, label: str, share: str, plan: Plan) -> tuple[Peer, Peer]:
    return _peer(
        name,
        label,
        "Kitty (Xia et al., 2025)",
        f"2 bit, keys per channel in pages of 128 tokens, of whose channels the largest {share} has 4 bit, values per "
        "token; the first 32 and the last 128 values exact, of keys those that do not fill a page",
        plan,
    )


SIMULATED: tuple[Peer, ...] = (
    *_kvquant(4),
    *_kvquant(3),
    *_kvquant(2),
    *_kvarn(4, 4),
    *_kvarn(4, 2),
    *_kvarn(2, 2),
    *_kitty("kitty", "Kitty", "eighth", kitty(1 / 8)),
    *_kitty("kitty-pro", "Kitty Pro", "quarter", kitty(1 / 4)),
)
