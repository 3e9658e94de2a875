"""Checks and measures the Triton kernels on a GPU: results/gpu.json, and plots beside it.

    python tools/gpu/run.py [--json FILE] [--seconds 540] [--part correctness] [--smoke]

Runs from a bare checkout. Parts come in the order of their importance, each in a process of its own; what there is no
time for is left out, and named. `--smoke` goes through all of it at tiny sizes in Triton's interpreter, without a GPU.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    # Not this folder itself, whose files would be top-level modules.
    sys.path[:1] = [str(ROOT / part) for part in ("tools", ".", "kernels", "evals")]
    from gpu.command import main

    sys.exit(main())
