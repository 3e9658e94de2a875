"""`kvquant eval`: its arguments, and what it does with them. Loads models' code only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant_evals.error import EvalError
from kvquant_evals.option import check_writable, parse_bits_option, write_json
from kvquant_evals.settings import Settings

if TYPE_CHECKING:
    from kvquant_evals.model import Placement, Subject
    from kvquant_evals.results import Results
    from kvquant_evals.rows import Contender, Report
    from kvquant_evals.runner import Evaluation, Job
    from kvquant_evals.share import Share

SUMMARY = "Quality, memory and speed of quantized caches on a model, against full precision and against peers."
EXIT_BROKEN, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

LONG = 60.0  # seconds from which on it is told before how long it will take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    bits = "8, 4, 3, 2, 16, fp8, or key,value; repeatable (default: 8 and 4)"
    add("--bits", action="append", type=parse_bits_option, metavar="B", help=bits)
    tasks = "tasks of ours and of lm-eval, separated by commas (default: perplexity and needles; all: all of ours)"
    add("--tasks", default="perplexity,needles", metavar="A,B", help=tasks)
    add("--list-tasks", action="store_true", help="only tell which of ours there are")
    add("--include-path", metavar="DIR", help="a folder with more tasks of lm-eval")
    add("--peer", action="append", metavar="NAME", default=[], help="also somebody else's cache; repeatable")
    add("--peers", action="store_true", help="also all of these that can run here")
    add("--list-peers", action="store_true", help="only tell what they are")
    add("--model", help="a hub id, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    add("--local-files-only", action="store_true", help="fetch nothing from the hub")
    add("--device", help="as torch names it (default: the accelerator, else cpu)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(default: float32 on a CPU, else bfloat16)")
    add("--attn", metavar="NAME", help="transformers' attention: sdpa, eager, ... (default: the model's)")
    add("--text", metavar="FILE", help="text to measure on (default: Python's language reference)")
    _add_settings(parser)
    add("--out", metavar="DIR", help="keep what is finished there, and go on from there")
    add("--json", metavar="FILE", help="where to write everything that was found")


def run(options: argparse.Namespace) -> int:
    """Evaluates and prints. Returns the exit code: 0; 1 if a cache is broken; 2 after one line on standard error; 130
    after Ctrl-C, with what all caches had finished.
    """
    if options.list_peers or options.list_tasks:
        sys.stdout.write(_listing(options) + "\n")
        return 0
    try:
        return _run(options)
    except EvalError as error:
        sys.stderr.write(f"kvquant eval: {error}\n")
        return EXIT_USAGE


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that were asked for, the defaults for the rest."""
    wanted = {name: getattr(options, name) for name in (field.name for field in _fields())}
    given: dict[str, Any] = {
        name: tuple(dict.fromkeys(x)) if isinstance(x, list) else x for name, x in wanted.items() if x is not None
    }
    settings = Settings(**given)
    return replace(settings, skip=min(settings.skip, settings.tokens // 2))


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for field in _fields():
        flag, about = f"--{(field.metadata['flag'] or field.name).replace('_', '-')}", field.metadata["help"]
        if isinstance(field.default, bool):
            parser.add_argument(flag, dest=field.name, action="store_true", help=about)
            continue
        several: dict[str, Any] = {"action": "append"} if isinstance(field.default, tuple) else {}
        about += "; repeatable" if several else ""
        about += "" if field.default is None else f" (default: {' and '.join(map(str, _several(field.default)))})"
        parse, unit = _parser(field), field.metadata["unit"]
        parser.add_argument(flag, dest=field.name, type=parse, metavar=unit, help=about, **several)


def _several(default: Any) -> tuple[Any, ...]:
    return default if isinstance(default, tuple) else (default,)


def _parser(field: Any) -> Callable[[str], Any]:
    """The field's parser, such that argparse tells what it says."""

    def parse(text: str) -> Any:
        try:
            return field.metadata["parse"](field.metadata["flag"] or field.name, text)
        except EvalError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _fields() -> Sequence[Any]:
    return [field for field in fields(Settings) if field.metadata]


def _listing(options: argparse.Namespace) -> str:
    from kvquant_evals import task
    from kvquant_evals.peers import catalog

    return catalog.listing() if options.list_peers else task.listing()


def _run(options: argparse.Namespace) -> int:
    from kvquant_evals import model, runner, task
    from kvquant_evals.peers import catalog
    from kvquant_evals.results import Results
    from kvquant_evals.share import Share

    check_writable("json", options.json)
    settings, tasks = settings_of(options), task.find(options.tasks, options.include_path)
    text = model.default_text() if options.text is None else model.read_text(options.text)
    source = model.find_source(options.model, local_only=options.local_files_only)
    jobs = runner.plan(tasks, source, text, settings)
    peers = catalog.runnable() if options.peers else catalog.find(options.peer)
    share = Share.find()
    results = Results(share.folder(Path(options.out) if options.out else None))
    subject = source.load(_placement(options, share))
    contenders = [*_ours(options, subject), *(peer.contender(subject) for peer in peers)]
    evaluation = runner.Evaluation(subject, text, settings, contenders)
    folder = options.include_path and str(Path(options.include_path).resolve())
    results.identify(evaluation.identity() | {"include_path": folder})
    interrupted = _evaluate(evaluation, share, jobs, results)
    if not share.is_first:
        return EXIT_INTERRUPTED if interrupted else 0
    report = evaluation.report(jobs, results)
    results.write_report(report.to_dict())
    _print(report, options)
    return EXIT_INTERRUPTED if interrupted else EXIT_BROKEN if report.broken else 0


def _placement(options: argparse.Namespace, share: Share) -> Placement:
    """Raises EvalError if there is no such device here."""
    import torch

    from kvquant_evals.model import Placement

    try:
        device = torch.device(options.device) if options.device else share.device()
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise EvalError(f"device {options.device!r} cannot be used: {first_line}") from error
    return Placement(device, getattr(torch, options.dtype) if options.dtype else None, options.attn)


def _ours(options: argparse.Namespace, subject: Subject) -> list[Contender]:
    """Full precision and our caches."""
    from kvquant import QuantConfig
    from kvquant_evals.rows import Contender

    wanted = dict.fromkeys(options.bits or [8, 4])
    ours = [Contender.quantized(_label(bits), QuantConfig.preset(bits), subject) for bits in wanted]
    return [Contender.full_precision(subject), *ours]


def _evaluate(evaluation: Evaluation, share: Share, jobs: Sequence[Job], results: Results) -> bool:
    """Whether it was interrupted; what was finished by then is in `results`."""
    mine = share.of(jobs)
    try:
        with _bar(evaluation.tokens(mine, results), share) as advance:
            _foretell(evaluation, share, mine, results)
            evaluation.run(mine, results, advance)
        share.wait()
        results.read()
    except KeyboardInterrupt:
        sys.stderr.write("\nkvquant eval: interrupted; what was finished follows\n")
        return True
    return False


@contextmanager
def _bar(total: int, share: Share) -> Iterator[Callable[[str, int], None]]:
    """A progress bar in tokens, of the first process only."""
    from tqdm import tqdm

    with tqdm(total=total, unit="tok", dynamic_ncols=True, disable=not share.is_first) as bar:

        def advance(title: str, tokens: int) -> None:
            if bar.desc != f"{title}: ":
                bar.set_description(title)
            bar.update(tokens)

        yield advance


def _foretell(evaluation: Evaluation, share: Share, jobs: Sequence[Job], results: Results) -> None:
    """Tells about how long a long evaluation will take."""
    from tqdm import tqdm

    from kvquant_evals.runner import tokens_per_second

    if not share.is_first:
        return
    total = evaluation.tokens(jobs, results)
    rate = tokens_per_second(evaluation.subject, evaluation.text, evaluation.settings.chunk)
    if total / rate >= LONG:
        minutes = round(total / rate / 60)
        tqdm.write(f"kvquant eval: about {minutes} min for {total:,} tokens at {rate:,.0f} tok/s", file=sys.stderr)


def _print(report: Report, options: argparse.Namespace) -> None:
    from kvquant_evals import table

    plain, tell = report.to_dict(), sys.stderr.write
    if report.rows:
        sys.stdout.write(f"\n{table.caption(plain)}\n\n{table.plain(plain)}\n")
    for row in report.rows:
        for task, reason in row.failures.items():
            tell(f"kvquant eval: {row.label} has no {task}: {reason}\n")
        for task, reason in row.faults.items():
            tell(f"kvquant eval: {row.label} is broken, says {task}: {reason}\n")
        if row.is_untested:
            tell(f"kvquant eval: {row.label} packed nothing in so few tokens; use more --tokens\n")
    if not report.is_complete and options.out:
        tell(f"kvquant eval: the same command goes on with what {options.out} does not hold yet\n")
    write_json(options.json, plain)


def _label(bits: Any) -> str:
    if isinstance(bits, tuple):
        return f"K {bits[0]} V {bits[1]} bit"
    return bits if isinstance(bits, str) else f"{bits} bit"
