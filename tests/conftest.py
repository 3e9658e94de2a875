"""Shared fixtures: determinism, tiny models, and the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which others may do before our kernels

from transformers.utils import logging


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tiny tensors gain nothing from threads, and tests may run side by side.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct with its tokenizer; tests that use it are marked slow."""
    from kvquant_evals.model import find_source

    return find_source().load()


@pytest.fixture(scope="session")
def text_ids(smollm2):
    """CPython's language reference in SmolLM2's tokens: int64 [1, 100 thousand and some]."""
    from kvquant_evals.model import default_text

    return smollm2.encode(default_text())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test may save a cache."""
    return tmp_path / "prefix.safetensors"
