"""Activation patching: what each activation, at each layer and position, does to a metric.

Run one document, with one activation of another document put in; do so for every layer, position
and site, and read how far the metric moves. "denoise" puts clean activations into the corrupted
run (what is sufficient), "noise" corrupted ones into the clean run (what is necessary). The sweep
is exact, and a fraction of its price: see `hooked_ssm.analysis.engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_ssm.analysis.contrast import warn_of_weak_contrast
from hooked_ssm.analysis.engine import Cell, Interchange, check_pair
from hooked_ssm.analysis.metrics import (
    MetricFunction,
    Metrics,
    measure,
    measure_run,
    named_metrics,
)
from hooked_ssm.analysis.patching_result import ActivationPatching, SiteValues
from hooked_ssm.analysis.resume import read_positions
from hooked_ssm.analysis.sweep import Direction, Heads, Plan, Positions, make_columns, make_plans
from hooked_ssm.checks import AttentionMask, Count, Indices, Words, checked
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm

log = logging.getLogger(__name__)


@checked
@torch.no_grad()
def activation_patching(
    model: HookedModel,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metrics,
    *,
    sites: Words = ("resid_pre",),
    layers: Indices | None = None,
    positions: Positions = None,
    heads: Heads = None,
    direction: Direction = "denoise",
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
    max_batch: Count = 512,
    progress: bool = False,
) -> ActivationPatching:
    """Patch every layer, position (and head) of every site; exactly one forward per cell's numbers.

    Ctrl-C ends the sweep and returns what was measured so far; the other cells are NaN, and
    `interrupted` is True. A warning is logged where clean and corrupted hardly differ in a metric.

    Args:
        model: Any `HookedModel`; run in eval mode, and left in its own.
        clean, corrupted: Documents that agree position by position. [batch, pos]
        metric: A function of the logits where they are read, [batch d_vocab] -> [batch], or a
            mapping from names to several; see `hooked_ssm.analysis.metrics`.
        sites: Words or roles as in `find_site`: "resid_pre", "mixer_out", "mlp_out", "conv",
            "carry", "state", "pattern", "q", ... A layer that lacks one is passed over.
        layers: Which layers; all if None.
        positions: None: every position of the sequence. A list of indices: those, the same in
            all documents. A mapping from names to one position per document, such as a
            `TaskBatch`'s `positions`: those. "all": patch all positions at once.
        heads: None: the whole activation. Indices, or "all": head by head, at sites with heads.
        direction: "denoise" or "noise".
        read_at: The position of each document where logits are read; the last if None. [batch]
        attention_mask: False at padding, of both inputs. [batch, pos]
        max_batch: Most documents in one forward: bounds the memory.
        progress: Show a progress bar.

    Raises:
        ShapeError: Inputs, mask or metric do not fit each other, or a position or head lies
            outside; before anything runs.
        HookNameError: No layer has one of the sites.
        ConfigError: Unknown direction, or no metric.
    """
    check_pair(clean, corrupted, attention_mask)
    metrics = named_metrics(metric, len(clean), model.cfg.d_vocab)
    columns = make_columns(positions, clean)
    plans = make_plans(model, sites, layers, heads)
    base, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    read_at = read_positions(clean, read_at)
    was_training = model.training
    model.eval()
    try:
        engine = Interchange(
            model, base, source, read_at, attention_mask=attention_mask, max_batch=max_batch
        )
        before = [
            measure_run(metrics, logits, run)
            for logits, run in ((engine.base_logits, "base"), (engine.source_logits, "source"))
        ]
        warn_of_weak_contrast(list(metrics), before[0], before[1], direction)
        cells = [
            Cell(site, at, head)
            for plan in plans
            for site in plan.sites
            for at in columns.values()
            for head in plan.heads
        ]
        shape = (len(metrics), len(cells), len(clean))
        values = before[0].new_full(shape, torch.nan)  # what an interrupt leaves unmeasured
        interrupted = _measure_cells(engine, cells, metrics, values, progress)
    finally:
        model.train(was_training)
    found = _collect(plans, columns, values, before, list(metrics), direction)
    return replace(found, interrupted=interrupted)


def _measure_cells(
    engine: Interchange,
    cells: list[Cell],
    metrics: Mapping[str, MetricFunction],
    values: Tensor,
    progress: bool,
) -> bool:
    """Fill in the metrics of every cell [metric, cell, batch]; return whether Ctrl-C ended it."""
    with tqdm(total=len(cells), disable=not progress, desc="cells") as bar:
        try:
            for indices, logits in engine.run(cells):
                for index, some in zip(indices, logits, strict=True):
                    values[:, index] = measure(metrics, some)
                bar.update(len(indices))
        except KeyboardInterrupt:
            if bool(values.isnan().all()):
                raise  # nothing to keep
            log.warning("interrupted: the cells that were not measured are NaN")
            return True
    return False


def _collect(
    plans: list[Plan],
    columns: Mapping[str | int, Tensor],
    values: Tensor,
    before: list[Tensor],
    metrics: list[str],
    direction: str,
) -> ActivationPatching:
    """Cut the cells' values into one table per site. values: [metric, cell, batch]"""
    found, first = {}, 0
    for plan in plans:
        shape = (len(plan.sites), len(columns), len(plan.heads))
        size = shape[0] * shape[1] * shape[2]
        table = values[:, first : first + size].unflatten(1, shape)
        found[plan.word] = SiteValues(
            values=table if plan.head_labels else table.squeeze(3),
            layers=[site.layer for site in plan.sites],
            hooks=[site.hook for site in plan.sites],
            heads=plan.head_labels,
        )
        first += size
    return ActivationPatching(found, list(columns), metrics, before[0], before[1], direction)
