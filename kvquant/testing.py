"""How results are compared with a reference: for our tests, and those of projects that add formats or kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RelativeErrors(NamedTuple):
    """Deviations from a reference, in units of the reference's root mean square."""

    maximum: float
    rms: float


def relative_errors(out: Tensor, reference: Tensor) -> RelativeErrors:
    """The deviations of `out` from `reference`, computed in float64. NaN where either holds NaN."""
    scale = reference.double().square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    deviation = (out.double() - reference.double()) / scale
    return RelativeErrors(deviation.abs().max().item(), deviation.square().mean().sqrt().item())
