"""All plots, in the order in which a page shows them."""

from kvquant_evals.report.plot import Plot
from kvquant_evals.report.plots import attention, growth, quality, retrieval, tail

PLOTS: tuple[Plot, ...] = (
    quality.PLOT,
    tail.PLOT,
    retrieval.PLOT,
    growth.MEMORY_PLOT,
    growth.SPEED_PLOT,
    attention.PLOT,
)
