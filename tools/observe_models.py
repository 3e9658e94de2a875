"""Observes how attention reads the cache in every family of tests/support/family_table.py: results/models.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import __version__

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))


def main() -> int:
    from family_table import FAMILIES
    from observation import observe

    torch.set_num_threads(1)
    report = {"transformers": __version__, "families": [observe(name) for name in FAMILIES]}
    (ROOT / "results" / "models.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
