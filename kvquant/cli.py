"""`kvquant <verb>`: parses, calls, prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvquant import __version__
from kvquant.config import Bits, QuantConfig, parse_bits

if TYPE_CHECKING:
    from kvquant_evals.runner import Report
    from kvquant_evals.task import Settings

EXIT_BROKEN, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


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
    _add_eval(verbs)
    _add_bench(verbs)
    _add_plan(verbs)
    _add_doctor(verbs)
    options = parser.parse_args(arguments)
    try:
        exit_code: int = options.run(options)
    except KeyboardInterrupt:
        print("\nkvquant: interrupted before anything was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return exit_code


def _add_eval(verbs: Any) -> None:
    summary = "Quality and memory of quantized caches on a model, against full precision."
    parser = verbs.add_parser("eval", help=summary, description=summary)
    add = parser.add_argument
    add(
        "--bits",
        action="append",
        type=_bits,
        metavar="B",
        help="8, 4, 3, 2, 16, fp8, or key,value; repeatable (default: 8 and 4)",
    )
    add("--peer", action="append", metavar="NAME", default=[], help="also somebody else's cache; repeatable")
    add("--peers", action="store_true", help="also all of these that can run here")
    add("--list-peers", action="store_true", help="only tell what they are")
    add("--model", help="a hub id, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    add("--tokens", type=_count, default=4096, help="length of the text for perplexity (default: %(default)s)")
    add("--chunk", type=_count, default=128, help="tokens per forward pass (default: %(default)s)")
    add("--needles", type=_count, default=6, help="facts per document (default: %(default)s)")
    add(
        "--context",
        type=_count,
        action="append",
        metavar="N",
        help="document length in tokens; repeatable (default: 512 and 1024)",
    )
    add("--documents", type=_count, default=3, help="documents per length (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the documents (default: %(default)s)")
    add("--text", metavar="FILE", help="text to measure on (default: Python's language reference)")
    add("--json", metavar="FILE", help="where to write everything that was found")
    parser.set_defaults(run=_eval)


def _add_bench(verbs: Any) -> None:
    summary = "How fast decoding is on this machine's CPU, and what memory it takes, beside transformers' own caches."
    parser = verbs.add_parser("bench", help=summary, description=summary)
    add = parser.add_argument
    add(
        "--bits",
        action="append",
        type=_bits,
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
        type=_count,
        action="append",
        metavar="N",
        help="cached tokens; repeatable (default: 1024, 8192 and 32768)",
    )
    add("--rounds", type=_count, default=15, help="rounds in which contenders take turns (default: %(default)s)")
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="time QuantizedCache, where it can run")
    add("--memory", type=_count, metavar="N", help="also measure resident sets while decoding behind N tokens")
    add("--json", metavar="FILE", help="where to write the timings")
    add("--plot", metavar="FILE", help="where to draw them; needs matplotlib")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from kvquant_evals import model

    try:
        _check_writable("json", options.json)
        _check_writable("plot", options.plot)
        _time(options)
    except model.EvalError as error:
        print(f"kvquant bench: {error}", file=sys.stderr)
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
    _write_json(options.json, found)
    print(report.caption(found))
    for lines in report.printed(found):
        print(f"\n{table.aligned(lines)}")
    if options.plot:
        report.plot(found, options.plot)


def _add_plan(verbs: Any) -> None:
    from kvquant_evals.plan import verb  # loads neither torch nor transformers

    parser = verbs.add_parser("plan", help=verb.SUMMARY, description=verb.SUMMARY)
    verb.add_arguments(parser)
    parser.set_defaults(run=verb.run)


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


def _eval(options: argparse.Namespace) -> int:
    # Here, so that other verbs and `import kvquant` do not load models' code.
    from kvquant_evals import model, runner, task
    from kvquant_evals.peers import catalog

    if options.list_peers:
        print(catalog.listing())
        return 0
    contexts = tuple(dict.fromkeys(options.context or (512, 1024)))
    settings = task.Settings(
        tokens=options.tokens,
        chunk=options.chunk,
        skip=min(256, options.tokens // 2),
        needles=options.needles,
        contexts=contexts,
        documents=options.documents,
        seed=options.seed,
    )
    try:
        _check_writable("json", options.json)
        peers = catalog.runnable() if options.peers else catalog.find(options.peer)
        text = model.default_text() if options.text is None else model.read_text(options.text)
        source = model.find_source(options.model)
        runner.check(source, text, settings)
        subject = source.load()
        wanted = dict.fromkeys(options.bits or [8, 4])
        contenders = [runner.Contender.quantized(_label(bits), QuantConfig.preset(bits), subject) for bits in wanted]
        contenders += [peer.contender(subject) for peer in peers]
        report = runner.Report(source.name, settings)
        interrupted = _evaluate(subject, text, settings, contenders, report)
        _print_report(report, options.json)
    except model.EvalError as error:
        print(f"kvquant eval: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_INTERRUPTED if interrupted else EXIT_BROKEN if report.broken else 0


def _evaluate(subject: Any, text: str, settings: Settings, contenders: Sequence[Any], report: Report) -> bool:
    """Whether the evaluation was interrupted; what was finished by then is in `report`."""
    from tqdm import tqdm

    from kvquant_evals import runner

    def open_bar(title: str, total: int, unit: str) -> Any:
        return tqdm(desc=title, total=total, unit=unit, dynamic_ncols=True)

    try:
        runner.evaluate(subject, text, settings, contenders, open_bar, report)
    except KeyboardInterrupt:
        print("\nkvquant eval: interrupted; rows finished so far follow", file=sys.stderr)
        return True
    return False


def _print_report(report: Report, json_path: str | None) -> None:
    from kvquant_evals import table

    plain = report.to_dict()
    if report.rows:
        print(f"\n{table.caption(plain)}\n\n{table.plain(plain)}")
    for row in report.rows:
        for task, reason in row.failures.items():
            print(f"kvquant eval: {row.label} has no {task}: {reason}", file=sys.stderr)
        if row.is_broken:
            print(f"kvquant eval: {row.label} is broken: mean KL {row.scores['kl_mean']:.2f} nats", file=sys.stderr)
        if row.is_untested:
            print(f"kvquant eval: {row.label} packed nothing in so few tokens; use more --tokens", file=sys.stderr)
    _write_json(json_path, plain)


def _write_json(path: str | None, report: dict[str, Any]) -> None:
    """Raises EvalError if the file cannot be written."""
    from kvquant_evals.model import EvalError

    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise EvalError(f"json {path!r} cannot be written: {error}") from error


def _check_writable(argument: str, path: str | None) -> None:
    """Raises EvalError if a file could not be written in the end. Leaves an existing one as it is."""
    from kvquant_evals.model import EvalError

    if path is None:
        return
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise EvalError(f"{argument} {path!r} cannot be written: {error}") from error


def _label(bits: Bits | tuple[Bits, Bits]) -> str:
    if isinstance(bits, tuple):
        return f"K {bits[0]} V {bits[1]} bit"
    return bits if isinstance(bits, str) else f"{bits} bit"


def _bits(text: str) -> Bits | tuple[Bits, Bits]:
    try:
        return parse_bits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
