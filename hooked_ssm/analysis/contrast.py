"""Whether two runs differ enough in a metric for a share of their difference to mean anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxtyping import Bool, Float
from torch import Tensor

log = logging.getLogger(__name__)

LEAST_ERRORS = 2.0
"""Fewer standard errors than this between the means of two runs are called no difference."""


def is_weak(
    base: Float[Tensor, "*metric batch"], source: Float[Tensor, "*metric batch"]
) -> Bool[Tensor, "*metric"]:
    """Return whether |mean(source - base)| is at most two of its standard errors over documents.

    Exactly no difference is weak with any number of documents, also with one, which has no error.
    """
    difference = source.double() - base.double()
    mean, n = difference.mean(-1).abs(), difference.shape[-1]
    if n == 1:
        return mean == 0
    return mean <= LEAST_ERRORS * difference.std(-1) / n**0.5


def warn_of_weak_contrast(
    metrics: Sequence[str],
    base: Float[Tensor, "metric batch"],
    source: Float[Tensor, "metric batch"],
    direction: str,
) -> None:
    """Log a warning for each metric in which the two unpatched runs hardly differ.

    Recovery divides by that difference: it is noise then, and NaN where there is none at all.
    """
    for name, before, after, weak in zip(
        metrics, base, source, is_weak(base, source).tolist(), strict=True
    ):
        if weak:
            clean, corrupted = (before, after) if direction == "noise" else (after, before)
            log.warning(
                "the corruption hardly changes metric %r: its mean over %d documents is %.4g "
                "clean and %.4g corrupted, equal or less than %g standard errors apart. Recovery "
                "divides by that difference, so it is noise (NaN where they are equal). Train the "
                "model, choose another corruption, or look at `effect` instead of `recovery`",
                name,
                len(clean),
                clean.mean().item(),
                corrupted.mean().item(),
                LEAST_ERRORS,
            )


def contrast_words(base: Tensor, source: Tensor, direction: str) -> str:
    """Return a metric's means in the run that is patched and in the other one, for titles.

    Where values count from the base run, as estimates do, the means differ by the total effect.
    """
    if not base.any():
        return f"total effect {source.mean().item():.3g}"
    runs = ("clean", "corrupted") if direction == "noise" else ("corrupted", "clean")
    return f"{runs[0]} {base.mean().item():.3g}, {runs[1]} {source.mean().item():.3g}"
