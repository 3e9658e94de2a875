"""`python -m kvquant_evals.lm_harness`: lm-eval's own command, with `--model kvquant` among its models.

Up to 0.4.13, lm-eval knows only models of its own; later ones find ours by its entry point, from their own command.
"""

from __future__ import annotations

import sys

from kvquant_evals.error import EvalError


def main() -> int:
    """Runs lm-eval with the arguments of this process. Returns the exit code."""
    try:
        from lm_eval.__main__ import cli_evaluate

        from kvquant_evals.lm_harness.lm import register
    except ImportError as error:
        sys.stderr.write(f"lm-eval cannot be imported ({error}); get it with: pip install 'kvquant-cache[eval]'\n")
        return 2
    register()
    try:
        cli_evaluate()
    except EvalError as error:
        sys.stderr.write(f"kvquant: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
