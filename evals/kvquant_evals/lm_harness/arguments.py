"""`--model_args` of lm-eval: which model, and which kind of cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvquant import QuantConfig
from kvquant.config import parse_bits
from kvquant_evals.error import EvalError
from kvquant_evals.model import Placement, Subject, find_source
from kvquant_evals.peers import catalog
from kvquant_evals.rows import Contender

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_BITS = 4


@dataclass(frozen=True)
class Arguments:
    """What lm-eval passes on from its command line.

    pretrained: a hub id, a folder or a .gguf file; SmolLM2-135M-Instruct by default. bits: 4, fp8, or 8/4 and 8+4 for
    keys and values, since a comma ends an argument. peer: a cache of others instead, by its name in `kvquant eval`.
    chunk: tokens per forward pass where they are scored. max_length: tokens of a context with its continuation.
    """

    pretrained: str | None = None
    bits: Any = None
    peer: str | None = None
    dtype: str | None = None
    device: str | None = None
    attn: str | None = None
    chunk: int = 128
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.peer is not None:
            raise EvalError(f"bits={self.bits} and peer={self.peer!r} are two caches; give one of them")
        if self.dtype not in (None, "auto", *DTYPES):
            raise EvalError(f"dtype={self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        for name in ("chunk", "max_length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise EvalError(f"{name}={value!r} must be a positive whole number")
        # So that mistakes in these are told before the model is loaded.
        catalog.find([self.peer] if self.peer is not None else [])
        _quant(self._bits)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Arguments:
        """Raises EvalError for names or values that mean nothing to us."""
        known = [field.name for field in fields(Arguments)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise EvalError(f"model_args {', '.join(unknown)} are unknown; known are {', '.join(known)}")
        return Arguments(**given)

    def load(self) -> Subject:
        """The model. Raises EvalError if there is none such, RuntimeError for an unknown device."""
        # lm-eval says cuda:0 if its user says nothing, also where there is none.
        name = self.device if torch.cuda.is_available() or not str(self.device).startswith("cuda") else None
        device = Placement.default().device if name is None else torch.device(name)
        dtype = getattr(torch, self.dtype) if self.dtype in DTYPES else None
        return find_source(self.pretrained).load(Placement(device, dtype, self.attn))

    def contender(self, subject: Subject) -> Contender:
        """The kind of cache. Raises EvalError if there is none such."""
        if self.peer is not None:
            return catalog.find([self.peer])[0].contender(subject)
        return Contender.quantized(f"bits={self._bits}", _quant(self._bits), subject)

    @property
    def _bits(self) -> Any:
        return DEFAULT_BITS if self.bits is None else self.bits


def _quant(bits: Any) -> QuantConfig:
    """Of bits as lm-eval hands them on: a number, a string, or a list or tuple if they were in brackets."""
    text = ",".join(map(str, bits)) if isinstance(bits, list | tuple) else re.sub("[/+]", ",", str(bits))
    try:
        return QuantConfig.preset(parse_bits(text))
    except ValueError as error:
        raise EvalError(str(error)) from error
