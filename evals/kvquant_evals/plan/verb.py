"""`kvquant plan`: its arguments, and what it does with them. Loads models' code only when it runs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvquant_evals.plan.fit import Budget
    from kvquant_evals.plan.option import Plan
    from kvquant_evals.plan.size import Workload

SUMMARY = "What a model's cache takes at a context and batch with every choice of bits, and what fits into a GPU."
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `kvquant plan` takes. Numbers are read by `run`, so that a wrong one is told in one line."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a hub id, a folder with config.json or a .gguf file; no weights are loaded")
    add("--context", default="128k", metavar="N", help="tokens per row; k is 1,024 (default: %(default)s)")
    add("--batch", default="1", metavar="N", help="rows (default: %(default)s)")
    add("--shared-prefix", metavar="N", help="tokens that all rows begin with; their packed pages are kept once")
    add("--gpu-memory", metavar="SIZE", help="what the GPU has, as in 80GB or 40GiB; without it, only sizes are told")
    add("--weights", metavar="SIZE", help="what the weights take (default: all parameters in the model's dtype)")
    add("--reserve", default="10%", metavar="SIZE", help="what to leave free, as a share or size (default: 10%%)")
    add("--dtype", help="bfloat16, float16 or float32 (default: the model's own)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where pages lie (default: %(default)s)")
    add("--quantize-sliding", action="store_true", help="pack layers with a sliding window as well")
    add("--workload", choices=("agents", "retrieval", "chat"), help="what it is for: asks for advice")
    add("--json", metavar="FILE", help="where to write everything that was found")


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit code: 0, or 2 after one line on standard error."""
    from kvquant_evals.error import EvalError

    try:
        sys.stdout.write(_planned(options))
    except EvalError as error:
        sys.stderr.write(f"kvquant plan: {error}\n")
        return EXIT_USAGE
    return 0


def _planned(options: argparse.Namespace) -> str:
    from kvquant_evals.option import check_writable, write_json
    from kvquant_evals.plan import report
    from kvquant_evals.plan.advice import advise

    check_writable("json", options.json)
    plan = plan_for(options)
    advice = None if options.workload is None else advise(plan, options.workload)
    write_json(options.json, report.to_dict(plan, advice))
    return report.printed(plan, advice) + "\n"


def plan_for(options: argparse.Namespace) -> Plan:
    """The plan that was asked for. Raises EvalError for what cannot be read, found or planned."""
    from kvquant_evals.model import find_config
    from kvquant_evals.plan.architecture import Architecture
    from kvquant_evals.plan.option import make_plan

    workload, dtype = _workload(options), _dtype(options.dtype)
    _budget(options, 0)  # before anything is loaded
    architecture = Architecture.of(find_config(options.model), dtype)
    budget = _budget(options, architecture.weight_bytes)
    quantize_sliding = options.quantize_sliding
    return make_plan(options.model, architecture, workload, options.device, budget, quantize_sliding=quantize_sliding)


def _workload(options: argparse.Namespace) -> Workload:
    from kvquant_evals.error import EvalError
    from kvquant_evals.plan.quantity import parse_count, parse_tokens
    from kvquant_evals.plan.size import Workload

    tokens, batch = parse_tokens("context", options.context), parse_count("batch", options.batch)
    shared = 0 if options.shared_prefix is None else parse_tokens("shared-prefix", options.shared_prefix)
    if shared > tokens:
        raise EvalError(f"shared-prefix {options.shared_prefix!r} is longer than context {options.context!r}")
    return Workload(tokens, batch, shared)


def _budget(options: argparse.Namespace, estimated: int) -> Budget | None:
    """The memory of the GPU and what of it is taken, with weights of `estimated` bytes unless told otherwise."""
    from kvquant_evals.error import EvalError
    from kvquant_evals.plan.fit import Budget
    from kvquant_evals.plan.quantity import parse_bytes, parse_share

    weights = estimated if options.weights is None else parse_bytes("weights", options.weights)
    if options.gpu_memory is None:
        if options.weights is not None:
            raise EvalError("weights are of use only with gpu-memory; give both")
        return None
    memory = parse_bytes("gpu-memory", options.gpu_memory)
    return Budget(memory, weights, parse_share("reserve", options.reserve, memory))


def _dtype(name: str | None) -> torch.dtype | None:
    from kvquant_evals.error import EvalError
    from kvquant_evals.plan.architecture import DTYPES

    if name is not None and name not in DTYPES:
        raise EvalError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
