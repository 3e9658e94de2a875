"""`kvquant compare`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvquant_evals.compare.limit import MEASURES, Amount, Limits, parse_amount, parse_increase
from kvquant_evals.error import EvalError

if TYPE_CHECKING:
    from kvquant_evals.report.saved import Saved

SUMMARY = "An evaluation against an earlier one: what is different, and whether ours is worse than allowed."
EXIT_WORSE, EXIT_USAGE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="the earlier evaluation: what `kvquant eval` wrote to --out or --json")
    add("b", metavar="B", help="the one that must not be worse")
    add("--label", action="append", default=[], metavar="CACHE", help="only the row of that name; repeatable")
    for measure in MEASURES:
        if measure.limit:
            add(measure.limit_flag, dest=f"{measure.name}_limit", type=parse_amount, metavar="X",
                help=f"for {measure.score} of every cache of ours in B: {measure.limit} (default: none)")  # fmt: skip
        about = f"by how much {measure.score} may be worse in B than in A (default: {measure.allowed or 'any'})"
        add(measure.change_flag, dest=f"{measure.name}_allowed", type=parse_increase, default=measure.allowed,
            metavar="X", help=about.replace("%", "%%"))  # fmt: skip
    add("--force", action="store_true", help="compare even if models or settings differ, or one is unfinished")
    add("--markdown", action="store_true", help="print the table in Markdown")


def run(options: argparse.Namespace) -> int:
    """Prints the differences. Returns the exit code: 0; 1 if B is worse than allowed, with a line on standard error for
    each reason; 2 after one line on standard error if the two cannot be compared.
    """
    try:
        return _compare(options)
    except EvalError as error:
        sys.stderr.write(f"kvquant compare: {error}\n")
        return EXIT_USAGE


def _compare(options: argparse.Namespace) -> int:
    from kvquant_evals import table
    from kvquant_evals.compare.change import HEADER, changes, complaints
    from kvquant_evals.report.saved import load

    limits = _limits(options)
    a, b = load("A", options.a), load("B", options.b)
    _check_labels(a, b, options.label)
    if not options.force:
        _check_comparable(a, b)
    found = changes(a, b, limits, options.label)
    lines = [list(HEADER), *(change.cells() for change in found)]
    sys.stdout.write(f"{table.markdown_table(lines) if options.markdown else table.aligned(lines)}\n\n")
    sys.stdout.write("".join(f"{note}\n" for note in _notes(a, b)))
    reasons = complaints(a, b, found, options.label)
    for reason in reasons:
        sys.stderr.write(f"kvquant compare: {reason}\n")
    sys.stdout.write("" if reasons else "nothing of ours is worse than allowed\n")
    return EXIT_WORSE if reasons else 0


def _limits(options: argparse.Namespace) -> Limits:
    given = _given(options, "limit", [measure.name for measure in MEASURES if measure.limit])
    if "retrieval" in given and given["retrieval"].value > 0:
        raise EvalError(f"min-retrieval {given['retrieval']} is relative to full precision; use one as -0.02, or 0")
    if "kl" in given and given["kl"].is_share:
        raise EvalError(f"max-kl {given['kl']} is in nats, of which there is no share; use one as 0.003")
    return Limits(given, _given(options, "allowed", [measure.name for measure in MEASURES]))


def _given(options: argparse.Namespace, kind: str, names: list[str]) -> dict[str, Amount]:
    found = {name: getattr(options, f"{name}_{kind}") for name in names}
    return {name: amount for name, amount in found.items() if amount is not None}


def _check_labels(a: Saved, b: Saved, labels: list[str]) -> None:
    known = dict.fromkeys(row.label for row in (*a.rows, *b.rows))
    for label in labels:
        if label not in known:
            raise EvalError(f"label {label!r} is in neither; there are {', '.join(map(repr, known))}")


def _check_comparable(a: Saved, b: Saved) -> None:
    """Raises EvalError naming everything in which they differ, other than in what is compared."""
    for name, saved in (("A", a), ("B", b)):
        if not saved.is_complete:
            raise EvalError(
                f"{name} {str(saved.path)!r} is unfinished, so that its scores are of fewer items; go on with it, or "
                "use --force"
            )
    differences = _differences(_conditions(a), _conditions(b))
    gone = [task for task in a.plain["tasks"] if task not in b.plain["tasks"]]
    differences += [f"B lacks the tasks {', '.join(gone)}"] if gone else []
    if differences:
        raise EvalError(f"A and B cannot be compared: {'; '.join(differences)}; use --force to do it nevertheless")


def _conditions(saved: Saved) -> dict[str, Any]:
    settings = {f"settings.{name}": value for name, value in saved.plain["settings"].items()}
    return {"model": saved.model, **settings, **saved.run}


def _notes(a: Saved, b: Saved) -> list[str]:
    """What else is different: the very thing, perhaps, whose effect is looked for."""
    found = _differences(*({**saved.plain["versions"], **saved.plain["machine"]} for saved in (a, b)))
    return [f"also different: {'; '.join(found)}"] if found else []


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Of what is in both: one of them may be from a version that tells less."""
    return [f"{name} is {a[name]} in A and {b[name]} in B" for name in a if name in b and a[name] != b[name]]
