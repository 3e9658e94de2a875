"""`kvquant <verb>`: parses, calls, prints. All verbs but `doctor` are those of the evaluations."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvquant import __version__

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130

# Each has SUMMARY, add_arguments(parser) and run(options); importing one loads no models' code.
VERBS = {
    "eval": "kvquant_evals.verb",
    "bench": "kvquant_evals.bench.verb",
    "plan": "kvquant_evals.plan.verb",
    "report": "kvquant_evals.report.verb",
    "compare": "kvquant_evals.compare.verb",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns the exit code: 0, 1 if a cache failed the sanity check, 130 after Ctrl-C.

    Exits with 2 and one line on standard error if the arguments ask for something that cannot be done.
    """
    parser = _Parser(prog="kvquant", description="KV-cache quantization for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"kvquant {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    for name, module in VERBS.items():
        _add_verb(verbs, name, importlib.import_module(module))
    _add_doctor(verbs)
    options = parser.parse_args(arguments)
    try:
        exit_code: int = options.run(options)
    except KeyboardInterrupt:
        print("\nkvquant: interrupted before anything was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return exit_code


def _add_verb(verbs: Any, name: str, module: Any) -> None:
    parser = verbs.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _add_doctor(verbs: Any) -> None:
    summary = "What kvquant runs on here: versions, and for every kernel whether it is used and why not."
    parser = verbs.add_parser("doctor", help=summary, description=summary)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    import torch
    import transformers

    from kvquant import kernel

    print(f"kvquant {__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    for found in kernel.discover():
        reason = found.missing() or (kernel.is_switched_off() and f"{kernel.SWITCH}=off")
        print(f"{found.name} ({found.device_type}): {f'not used: {reason}' if reason else found.describe()}")
    print("reference (any device): plain PyTorch, for what no kernel takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
