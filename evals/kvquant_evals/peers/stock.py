"""transformers' own quantized caches, which dequantize everything at each step and quantize it again at each flush."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Cache, LlamaConfig, PreTrainedConfig, QuantizedCache

from kvquant import QuantConfig
from kvquant_evals.model import Subject
from kvquant_evals.peers.peer import Peer

_WAIT = "exact until 128 tokens wait; then all is quantized again"
_BY_TOKEN = f"keys and values in groups of 64 channels of one token; {_WAIT}"
_BY_CHANNEL = f"keys in groups of 64 tokens of one channel, values of 64 channels of one token; {_WAIT}"
_STRIDED = f"groups of 64 numbers from all over heads and tokens; {_WAIT}"


@dataclass(frozen=True)
class Stock:
    """transformers' QuantizedCache. options: its arguments, of which those left out have its own defaults."""

    backend: str
    options: tuple[tuple[str, int], ...] = ()

    def missing(self) -> str | None:
        """What transformers says to the smallest model there is."""
        try:
            self.of(LlamaConfig(num_hidden_layers=1))
        except (ImportError, ValueError, TypeError) as error:
            return " ".join(str(error).split())
        return None

    def of(self, config: PreTrainedConfig) -> Cache:
        return QuantizedCache(self.backend, config, **dict(self.options))

    def new_cache(self, subject: Subject) -> Cache:
        return self.of(subject.model.config)

    def quant(self, subject: Subject) -> QuantConfig | None:  # noqa: ARG002  # the protocol of a recipe
        return None


def _peer(name: str, title: str, what: str, backend: str, **options: int) -> Peer:
    source = {
        "quanto": "transformers' QuantizedCache after KIVI (Liu et al., 2024) with optimum-quanto (2024)",
        "hqq": "transformers' QuantizedCache with HQQ (Badri and Shaji, 2023)",
        "fp8": "transformers' QuantizedCache with fp8 (pull request 48677, 2026)",
    }[backend]
    return Peer(name, f"QuantizedCache {title}", source, what, Stock(backend, tuple(options.items())))


STOCK: tuple[Peer, ...] = (
    _peer("quanto-4", "quanto 4", f"4 bit (the default), {_BY_TOKEN}", "quanto", nbits=4),
    _peer("quanto-4-channel", "quanto 4, keys per channel", f"4 bit, {_BY_CHANNEL}", "quanto", nbits=4, axis_key=-1),
    _peer("quanto-2", "quanto 2", f"2 bit, {_BY_TOKEN}", "quanto", nbits=2),
    _peer("hqq-8", "hqq 8", f"8 bit, {_STRIDED}", "hqq", nbits=8),
    _peer("hqq-4", "hqq 4", f"4 bit, {_STRIDED}", "hqq", nbits=4),
    _peer("hqq-4-token", "hqq 4, per token", f"4 bit, {_BY_TOKEN}", "hqq", nbits=4, axis_key=1, axis_value=1),
    _peer("hqq-2", "hqq 2", f"2 bit, {_STRIDED}", "hqq", nbits=2),
    _peer("hqq-2-token", "hqq 2, per token", f"2 bit, {_BY_TOKEN}", "hqq", nbits=2, axis_key=1, axis_value=1),
    _peer("stock-fp8", "fp8", "e4m3, one scale per layer that the first chunk sets; nothing exact", "fp8"),
)
