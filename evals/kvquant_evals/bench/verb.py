"""`kvquant bench`: its arguments, and what it does with them. Loads models' code only when it runs."""

from __future__ import annotations

import argparse
import sys

from kvquant_evals.error import EvalError
from kvquant_evals.option import check_writable, parse_bits_option, parse_count, write_json

SUMMARY = "How fast decoding is on this machine's CPU, and what memory it takes, beside transformers' own caches."
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--bits",
        action="append",
        type=parse_bits_option,
        metavar="B",
        help="as for eval; repeatable (default: 8, fp8, 8,4, 4, 4,2 and 2)",
    )
    add(
        "--model",
        action="append",
        help="a model whose decoding is timed, or random-1b for random weights of Llama-3.2-1B's shape; repeatable "
        "(default: SmolLM2-135M-Instruct)",
    )
    add(
        "--context",
        type=parse_count,
        action="append",
        metavar="N",
        help="cached tokens; repeatable (default: 1024, 8192 and 32768)",
    )
    rounds = "rounds in which contenders take turns, ten times as many for attention alone (default: %(default)s)"
    add("--rounds", type=parse_count, default=15, help=rounds)
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="time QuantizedCache, where it can run")
    add("--memory", type=parse_count, metavar="N", help="also measure resident sets while decoding behind N tokens")
    add("--json", metavar="FILE", help="where to write the timings")
    add("--plot", metavar="FILE", help="where to draw them; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Times and prints. Returns the exit code: 0, or 2 after one line on standard error."""
    try:
        check_writable("json", options.json)
        check_writable("plot", options.plot)
        _time(options)
    except EvalError as error:
        sys.stderr.write(f"kvquant bench: {error}\n")
        return EXIT_USAGE
    return 0


def _time(options: argparse.Namespace) -> None:
    import torch

    from kvquant_evals import table
    from kvquant_evals.bench import command, report

    plan = command.Plan(
        models=list(dict.fromkeys(options.model or [None])),
        contexts=sorted(set(options.context or (1024, 8192, 32_768))),
        bits=list(dict.fromkeys(options.bits or (8, "fp8", (8, 4), 4, (4, 2), 2))),
        threads=sorted({1, torch.get_num_threads()}),
        peers=options.peers,
        memory=options.memory,
        rounds=options.rounds,
        plot=options.plot is not None,
    )
    found = command.measure(plan).to_dict()
    write_json(options.json, found)
    sys.stdout.write(f"{report.caption(found)}\n")
    for lines in report.printed(found):
        sys.stdout.write(f"\n{table.aligned(lines)}\n")
    if options.plot:
        report.plot(found, options.plot)
