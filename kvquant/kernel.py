"""What an attention kernel is, and how kernels are found: by one scan of kvquant_kernels, when first needed."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvquant.layout import PageLayout, PagePart, PlainLayout

if TYPE_CHECKING:
    from kvquant.attention import AttentionCall
    from kvquant.snapshot import Snapshot

SWITCH = "KVQUANT_KERNELS"  # the environment variable that turns kernels off

_logger = logging.getLogger("kvquant")


class AttentionKernel(Protocol):
    """Attention on one type of device, over pages in a layout of its own.

    Of states with a window, `states.hidden` columns are hidden, and a call's mask covers the visible ones.
    """

    @property
    def name(self) -> str: ...

    @property
    def device_type(self) -> str: ...

    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine; None if it can."""

    def describe(self) -> str:
        """What runs, for `kvquant doctor`. Asked only where it is not missing."""

    def page_layout(self, key: PagePart, value: PagePart) -> PageLayout | str:
        """The layout that pages must have for this kernel, or why it cannot take them."""

    def unsupported(self, states: Snapshot, call: AttentionCall) -> str | None:
        """Why this kernel cannot take a call; None if it can."""

    def run(self, states: Snapshot, call: AttentionCall) -> Tensor:
        """The attention output [B, Hq, Q, Dv] in the query's dtype."""


@cache
def discover() -> tuple[AttentionKernel, ...]:
    """All kernels that are installed, whether or not they can run here: KERNEL of the modules of each family.

    What such modules import when they are used, packages within a family for example, is not scanned.

    Raises ImportError, naming the file, for a kernel that cannot be imported or shares its name with another.
    """
    import kvquant_kernels

    found: dict[str, AttentionKernel] = {}
    for info in _modules_of_families(kvquant_kernels):
        kernel: AttentionKernel | None = getattr(importlib.import_module(info.name), "KERNEL", None)
        if kernel is None:
            continue
        if kernel.name in found:
            raise ImportError(f"{info.name} defines a second kernel named {kernel.name!r}")
        found[kernel.name] = kernel
    return tuple(found.values())


def _modules_of_families(package: ModuleType) -> Iterator[pkgutil.ModuleInfo]:
    for family in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        found = importlib.import_module(family.name)
        yield from (info for info in pkgutil.iter_modules(found.__path__, f"{family.name}.") if not info.ispkg)


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "off"


def available(device_type: str) -> tuple[AttentionKernel, ...]:
    """The kernels to try on a device, none if the environment says KVQUANT_KERNELS=off."""
    return () if is_switched_off() else tuple(kernel for kernel in discover() if _is_usable(kernel, device_type))


def _is_usable(kernel: AttentionKernel, device_type: str) -> bool:
    if kernel.device_type != device_type:
        return False
    reason = kernel.missing()
    if reason is not None and not is_switched_off():
        log_once(f"{kernel.name} is not used, slower plain PyTorch is: {reason}")
    return reason is None


def choose_layout(key: PagePart, value: PagePart, device: torch.device) -> PageLayout:
    """The layout of the first kernel that can take such pages, else the plain one."""
    for kernel in available(device.type):
        layout = kernel.page_layout(key, value)
        if not isinstance(layout, str):
            return layout
        if not (key.fmt.is_exact and value.fmt.is_exact):
            log_once(f"{kernel.name} is not used: {layout}")
    return PlainLayout(key, value)


def choose(states: Snapshot, call: AttentionCall) -> AttentionKernel | None:
    """The first kernel that can take a call; None if the reference must.

    Whether kernels are switched off was asked when the pages were laid out, and is not asked again at every step.
    """
    device_type = states.chunk.key.device.type
    for kernel in discover():
        if not _is_usable(kernel, device_type):
            continue
        reason = kernel.unsupported(states, call)
        if reason is None:
            return kernel
        if not is_switched_off():
            log_once(f"{kernel.name} is not used: {reason}")
    return None


@cache
def log_once(message: str) -> None:
    _logger.warning(message)
