"""Caches as a model of lm-eval: whatever it asks for is read through them.

lm-eval's own models score in one pass without a cache, which a quantized cache never changes
(https://github.com/EleutherAI/lm-evaluation-harness/issues/1105).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvquant import __version__, cache_memory
from kvquant_evals.lm_harness.arguments import Arguments
from kvquant_evals.lm_harness.reader import Answer, Decoding, Reader, Reading, fit

NAME = "kvquant"
DEFAULT_LENGTH = 2048  # of contexts, where the model's configuration does not say; lm-eval's own default

Tokens = tuple[int, ...]


class CachedLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model that reads through a kind of cache, one row after the other whatever the batch size.

    readings, answers: what was found for each request, in their order; an answer with its context's tokens. packed: for
    each context that was scored over, whether the cache held a packed page of it; for caches that can tell.
    """

    def __init__(self, reader: Reader, max_length: int | None = None, show_progress: bool = True) -> None:
        super().__init__()
        self.reader = reader
        self.tokenizer = reader.subject.source.tokenizer
        self.readings: list[Reading] = []
        self.answers: list[tuple[list[int], Answer]] = []
        self.packed: list[bool] = []
        self._device = reader.subject.model.device
        self._max_length, self._show_progress = max_length, show_progress

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        token: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def max_length(self) -> int:
        return self._max_length or self.reader.subject.source.max_length or DEFAULT_LENGTH

    @property
    def tokenizer_name(self) -> str:
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            text: str = self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)
        except TemplateError:  # some templates know no system role
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Special tokens are added as the tokenizer does, unless the text begins with one, as a chat does."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        tokens: list[int] = self.tokenizer.encode(string, **options)
        return tokens

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm or not self._show_progress)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: dict[int, Reading] = {}
        with tqdm(total=len(requests), desc="kvquant loglikelihood", disable=disable_tqdm) as bar:
            for context, members in self._by_context(requests).items():
                found |= self._score(context, members)
                bar.update(len(found) - bar.n)
        readings = [found[index] for index in range(len(requests))]
        self.readings += readings
        answers = [(reading.total, reading.is_greedy) for reading in readings]
        for (asked, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", asked, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in self._bar(requests, "loglikelihood_rolling", disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            readings = [self.reader.stream(*make_disjoint_window(window)) for window in windows]
            self.readings += readings
            totals.append(sum(reading.total for reading in readings))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for request in self._bar(requests, "generate_until", disable_tqdm):
            context, options = request.args
            decoding = Decoding.of(options)
            what = f"max_gen_toks={decoding.max_tokens} of max_length={self.max_length}"
            tokens = fit(self.tok_encode(context), self.max_length - decoding.max_tokens, what)
            answer = self.reader.write(tokens, decoding)
            self.answers.append((tokens, answer))
            texts.append(answer.text)
            self.cache_hook.add_partial("generate_until", (context, options), answer.text)
        return texts

    def score_answer(self, context: Sequence[int], tokens: list[int]) -> Reading:
        """A reading of tokens that were written after a context, by whichever cache."""
        return self._score(tuple(context), [(0, tokens)])[0]

    def _by_context(
        self, requests: Sequence[tuple[Any, list[int], list[int]]]
    ) -> dict[Tokens, list[tuple[int, list[int]]]]:
        """The continuations, with the requests' indices, by what is left of their context where both are too long."""
        groups: dict[Tokens, list[tuple[int, list[int]]]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            what = f"{len(continuation)} tokens of a continuation, of max_length={self.max_length},"
            fitting = fit(context, self.max_length + 1 - len(continuation), what)
            groups.setdefault(tuple(fitting), []).append((index, continuation))
        return groups

    def _score(self, context: Tokens, members: Sequence[tuple[int, list[int]]]) -> dict[int, Reading]:
        """Readings by index, each over a copy of one cache. Continuations that differ in their last token only share a
        pass as well."""
        cache = self.reader.hold(context)
        memory = cache_memory(cache)
        self.packed += [memory.codes > 0] if memory.elements else []
        alike: dict[Tokens, list[tuple[int, list[int]]]] = {}
        for index, continuation in members:
            alike.setdefault((context[-1], *continuation[:-1]), []).append((index, continuation))
        found: dict[int, Reading] = {}
        for fed, group in alike.items():
            readings = self.reader.score(copy.deepcopy(cache), fed, [continuation for _, continuation in group])
            found |= {index: reading for (index, _), reading in zip(group, readings, strict=True)}
        return found

    def _bar(self, requests: Sequence[Any], title: str, disable: bool) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(requests, desc=f"kvquant {title}", disable=disable or not self._show_progress)
        return bar


class KvquantLM(CachedLM):
    """`--model kvquant` of lm-eval; `--model_args` are the fields of Arguments.

    Raises EvalError for what they cannot be.
    """

    def __init__(self, batch_size: int | str | None = None, max_batch_size: int | None = None, **given: Any) -> None:
        arguments = Arguments.of(given)
        subject = arguments.load()
        self.contender = arguments.contender(subject)
        super().__init__(Reader(subject, self.contender.new_cache, arguments.chunk), arguments.max_length)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes down with its results."""
        quant = self.contender.quant
        return {
            "kvquant_version": __version__,
            "kvquant_cache": self.contender.label,
            "kvquant_config": quant.to_dict() if quant else None,
            "model_dtype": str(self.reader.subject.model.dtype),
        }


def register() -> None:
    """Makes `kvquant` a model of lm-eval in this process."""
    # lm-eval adds its own only to an empty registry, or when this is imported.
    import lm_eval.models  # noqa: F401  # for what it registers

    register_model(NAME)(KvquantLM)
