"""Whether the native library is there; without it plain PyTorch does its work."""

from __future__ import annotations

import pytest

from kvquant_kernels.cpu import library

has_library = isinstance(library.load(), library.Library)
needs_library = pytest.mark.skipif(not has_library, reason="the native library is not built")
