"""What an evaluation measures: one value, whose fields are also options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvquant_evals.error import EvalError
from kvquant_evals.plan.quantity import parse_bytes, parse_count, parse_whole

Parse = Callable[[str, str], Any]


def _option(default: Any, about: str, *, flag: str | None = None, parse: Parse = parse_count, unit: str = "N") -> Any:
    """A field with an option of its own.

    flag: its name where that is not the field's, as for one that is repeated. parse: reads a value from the flag and
    its text. unit: what stands for a value in the help.
    """
    return field(default=default, metadata={"help": about, "flag": flag, "parse": parse, "unit": unit})


def _as_it_is(_argument: str, text: str) -> str:
    return text


def _parse_seed(argument: str, text: str) -> int:
    seed: int = parse_whole(argument, text)
    if seed >= 2**32:  # numpy takes no more
        raise EvalError(f"{argument} {text!r} must be below 2**32")
    return seed


@dataclass(frozen=True)
class Settings:
    """What is measured. Lengths are in tokens; a tuple is an option that may be given several times."""

    tokens: int = _option(4096, "length of each segment of text for perplexity")
    segments: int = _option(1, "segments of text for perplexity, from all over it")
    chunk: int = _option(128, "tokens per forward pass")
    contexts: tuple[int, ...] = _option((512, 1024), "length of documents and of caches", flag="context")
    retrieval: tuple[str, ...] = _option(
        ("multi_key",), "kind of retrieval, or all", flag="retrieval", parse=_as_it_is, unit="NAME"
    )
    needles: int = _option(6, "facts per document, or of its records those that are asked for")
    documents: int = _option(3, "documents per length and kind of retrieval")
    depths: int = _option(5, "depths of the fact, each in documents of its own, for single")
    records: int = _option(64, "records per document where so many fit, for records")
    hops: int = _option(4, "steps from a variable to its value, for variable_tracking")
    prompts: int = _option(4, "texts to be continued, for generate and attention")
    new_tokens: int = _option(256, "tokens to generate after each")
    batches: tuple[int, ...] = _option((1,), "rows that are decoded together, for speed", flag="batch")
    budget: int | None = _option(
        None,
        "what the cache may take, as in 8GB or 40GiB: memory then tells the longest context",
        parse=parse_bytes,
        unit="SIZE",
    )
    limit: int | None = _option(None, "samples of each task of lm-eval")
    num_fewshot: int | None = _option(None, "examples before each of its questions", parse=parse_whole)
    chat: bool = _option(False, "put documents and prompts into the model's chat template")
    seed: int = _option(0, "seed of all that is drawn", parse=_parse_seed)
    skip: int = 256  # leading tokens of a segment that are not scored
    offset: int = 20_000  # where in the text the first segment begins
