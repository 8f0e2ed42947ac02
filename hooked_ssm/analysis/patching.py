"""Activation patching: what each activation, at each layer and position, does to a metric.

Run one document, with one activation of another document put in; do so for every layer, position
and site, and read how far the metric moves. "denoise" puts clean activations into the corrupted
run (what is sufficient), "noise" corrupted ones into the clean run (what is necessary). The sweep
is exact, and a fraction of its price: see `hooked_ssm.analysis.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from hooked_ssm.analysis.engine import Cell, Interchange, check_pair
from hooked_ssm.analysis.exchange import head_axis
from hooked_ssm.analysis.metrics import Metrics, measure, named_metrics
from hooked_ssm.analysis.patching_result import ActivationPatching, SiteValues
from hooked_ssm.analysis.sites import Site, find_sites
from hooked_ssm.errors import ConfigError, HookNameError, ShapeError, unknown
from hooked_ssm.model import HookedModel

Direction = Literal["denoise", "noise"]
Positions = Sequence[int] | Mapping[str, Int[Tensor, " batch"]] | Literal["all"] | None
Heads = Sequence[int] | Literal["all"] | None


@torch.no_grad()
def activation_patching(
    model: HookedModel,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metrics,
    *,
    sites: Sequence[str] = ("resid_pre",),
    layers: Sequence[int] | None = None,
    positions: Positions = None,
    heads: Heads = None,
    direction: Direction = "denoise",
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: Tensor | None = None,
    max_batch: int = 512,
    progress: bool = False,
) -> ActivationPatching:
    """Patch every layer, position (and head) of every site; exactly one forward per cell's numbers.

    Args:
        model: Any `HookedModel`; run in eval mode, and left in its own.
        clean, corrupted: Documents that agree position by position. [batch, pos]
        metric: A function of the logits where they are read, [batch d_vocab] -> [batch], or a
            mapping from names to several; see `hooked_ssm.analysis.metrics`.
        sites: Words or roles as in `find_site`: "resid_pre", "mixer_out", "mlp_out", "conv",
            "carry", "state", "pattern", "q", ... A layer that lacks one is passed over.
        layers: Which layers; all if None.
        positions: None: every position of the sequence. Indices: those. A mapping from names to
            one position per document, such as a `TaskBatch`'s `positions`: those. "all": patch
            all positions at once.
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
    if direction not in get_args(Direction):
        raise ConfigError(unknown("direction", direction, get_args(Direction)))
    metrics = named_metrics(metric, len(clean))
    columns = _columns(positions, clean)
    plans = [_plan(model, word, layers, heads) for word in dict.fromkeys(_words(sites))]
    base, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    read_at = torch.full_like(clean[:, 0], clean.shape[1] - 1) if read_at is None else read_at
    was_training = model.training
    model.eval()
    try:
        engine = Interchange(
            model, base, source, read_at, attention_mask=attention_mask, max_batch=max_batch
        )
        before = [measure(metrics, x) for x in (engine.base_logits, engine.source_logits)]
        cells = [cell for plan in plans for cell in plan.cells(columns)]
        values = before[0].new_empty(len(metrics), len(cells), len(clean))
        with tqdm(total=len(cells), disable=not progress, desc="cells") as bar:
            for indices, logits in engine.run(cells):
                for index, some in zip(indices, logits, strict=True):
                    values[:, index] = measure(metrics, some)
                bar.update(len(indices))
    finally:
        model.train(was_training)
    return _collect(plans, columns, values, before, list(metrics), direction)


class _Plan(NamedTuple):
    """What is swept of one word: its sites, one per layer that has it, and their heads."""

    word: str
    sites: list[Site]
    heads: list[int | None]

    def cells(self, columns: Mapping[str | int, Tensor]) -> list[Cell]:
        return [
            Cell(site, at, head)
            for site in self.sites
            for at in columns.values()
            for head in self.heads
        ]


def _plan(model: HookedModel, word: str, layers: Sequence[int] | None, heads: Heads) -> _Plan:
    sites = find_sites(model, [word], layers)
    specs = [
        model.families[s.hook].spec if s.per_position else model.find_hook(s.hook).spec
        for s in sites
    ]
    for site, spec in zip(sites, specs, strict=True):
        if not (site.per_position or spec.position_axis is not None) or not spec.has_batch:
            raise ShapeError(
                f"{site.hook} has axes {list(spec.axes)}: it is one for all documents or "
                "positions, so it cannot be patched by position; use model.run_with_hooks"
            )
    if heads is None:
        return _Plan(word, sites, [None])
    axes = [head_axis(spec) for spec in specs]
    counts = {
        0 if axis is None else model.blocks[site.layer].mixer.axis_sizes()[spec.axes[axis]]
        for axis, spec, site in zip(axes, specs, sites, strict=True)
    }
    if len(counts) > 1 or 0 in counts:
        raise ShapeError(
            f"heads={heads!r}: site {word!r} has {sorted(counts)} heads in layers "
            f"{[s.layer for s in sites]}; sweep layers with one number of heads, or heads=None"
        )
    most = counts.pop()
    chosen = list(range(most)) if isinstance(heads, str) else [int(h) for h in heads]
    if (isinstance(heads, str) and heads != "all") or not all(0 <= h < most for h in chosen):
        raise ShapeError(f"heads={heads!r}; allowed: 'all', or indices in 0..{most - 1}")
    return _Plan(word, sites, list(chosen))


def _words(sites: Sequence[str]) -> Sequence[str]:
    if isinstance(sites, str) or not sites:
        raise HookNameError(
            f"sites={sites!r}; allowed: a non-empty list of words, such as ['resid_pre', 'conv']"
        )
    return sites


def _columns(positions: Positions, tokens: Tensor) -> dict[str | int, Tensor]:
    """What is swept along the sequence, by label. [batch] or, for "all", [batch, pos]"""
    batch, length = tokens.shape
    if isinstance(positions, Mapping):
        for name, at in positions.items():
            if at.shape != (batch,) or not bool(((at >= 0) & (at < length)).all()):
                raise ShapeError(
                    f"positions[{name!r}] must hold one index in 0..{length - 1} for each of the "
                    f"{batch} documents; got shape {list(at.shape)}"
                )
        columns = {name: at.to(tokens.device) for name, at in positions.items()}
    elif isinstance(positions, str):
        if positions != "all":
            raise ShapeError(f"positions={positions!r}; allowed: 'all', indices, a mapping, None")
        columns = {"all": torch.arange(length, device=tokens.device).expand(batch, -1)}
    else:
        wanted = range(length) if positions is None else [int(t) for t in positions]
        if not all(-length <= t < length for t in wanted):
            raise ShapeError(f"positions={list(wanted)}; allowed: 0..{length - 1}, or from the end")
        columns = {t % length: torch.full_like(tokens[:, 0], t % length) for t in wanted}
    if not columns:
        raise ShapeError("positions is empty; leave it None to sweep every position")
    return columns


def _collect(
    plans: list[_Plan],
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
        heads = [head for head in plan.heads if head is not None] or None
        found[plan.word] = SiteValues(
            values=table if heads else table.squeeze(3),
            layers=[site.layer for site in plan.sites],
            hooks=[site.hook for site in plan.sites],
            heads=heads,
        )
        first += size
    return ActivationPatching(found, list(columns), metrics, before[0], before[1], direction)
