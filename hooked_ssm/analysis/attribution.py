"""Attribution patching: what patching would do, to first order, for all activations at once.

    effect(node) ~ (source activation - base activation) . d metric / d base activation

One forward and backward per run instead of one forward per cell, at any site of any architecture:
states, carries, writes and patterns included. It is exact where the model is linear from the site
on; `agreement` says how good it is elsewhere, against exact patching of a sample.
Source: Nanda 2023 (attribution patching); Hanna et al. 2024 (integrated gradients over inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from hooked_ssm.analysis.contrast import warn_of_weak_contrast
from hooked_ssm.analysis.engine import check_pair
from hooked_ssm.analysis.exchange import Hook
from hooked_ssm.analysis.metrics import (
    MetricFunction,
    Metrics,
    measure,
    measure_run,
    named_metrics,
)
from hooked_ssm.analysis.patching_result import ActivationPatching, SiteValues
from hooked_ssm.analysis.resume import read_positions
from hooked_ssm.analysis.sites import Site, site_spec
from hooked_ssm.analysis.sweep import Direction, Heads, Plan, Positions, make_columns, make_plans
from hooked_ssm.checks import AttentionMask, Count, Indices, Words, checked
from hooked_ssm.errors import ConfigError
from hooked_ssm.model import HookedModel


@checked
def attribution_patching(
    model: HookedModel,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metrics,
    *,
    sites: Words = ("resid_pre",),
    layers: Indices | None = None,
    positions: Positions = None,
    heads: Heads = None,
    steps: Count = 1,
    direction: Direction = "denoise",
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
) -> ActivationPatching:
    """Estimate the effect of patching every layer, position (and head) of every site.

    Args:
        model, clean, corrupted, sites, layers, positions, heads, direction, read_at,
            attention_mask: As in `activation_patching`.
        metric: As there; it needs a gradient, so no "rank" or "accuracy".
        steps: 1: the gradient of the base run. More: the mean gradient over so many runs whose
            embeddings lie between the base's and the source's (midpoints of equal steps).

    Returns:
        As `activation_patching`, with metrics counted from the base run: `base` is zero, `source`
        the total effect, and the values are the estimated effects. All exactly zero for identical
        inputs.

    Raises:
        ShapeError, HookNameError, ConfigError: As in `activation_patching`, before anything runs;
            also ConfigError for a model in train mode, a metric without a gradient, or steps < 1.
    """
    check_pair(clean, corrupted, attention_mask)
    need_gradients(model, "attribution_patching")
    metrics = named_metrics(metric, len(clean), model.cfg.d_vocab)
    columns = make_columns(positions, clean)
    plans = make_plans(model, sites, layers, heads)
    base, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    # A caller's inference mode or no_grad would leave no gradients.
    with torch.inference_mode(False), torch.enable_grad():
        runs = GradientRuns(
            model,
            base.clone(),
            source.clone(),
            None if read_at is None else read_at.clone(),
            None if attention_mask is None else attention_mask.clone(),
        )
        names = [name for plan in plans for site in plan.sites for name in runs.names(site)]
        runs.go(names, metrics, steps)
        warn_of_weak_contrast(list(metrics), runs.base_values, runs.source_values, direction)
        found = {
            plan.word: SiteValues(
                values=_site_values(runs, plan, columns, len(metrics)),
                layers=[site.layer for site in plan.sites],
                hooks=[site.hook for site in plan.sites],
                heads=plan.head_labels,
            )
            for plan in plans
        }
    total = runs.source_values - runs.base_values
    return ActivationPatching(
        found, list(columns), list(metrics), torch.zeros_like(total), total, direction
    )


def need_gradients(model: HookedModel, what: str) -> None:
    """Refuse a model of which exact gradients cannot be had.

    Raises:
        ConfigError: It is in train mode, or its weights were made in inference mode.
    """
    if model.training:
        raise ConfigError(f"{what}: the model is in train mode; model.eval() first")
    refuse_inference_weights(model, what)


def refuse_inference_weights(model: HookedModel, what: str) -> None:
    """Refuse a model through which torch keeps no gradients.

    Raises:
        ConfigError: Its weights were made in inference mode.
    """
    if any(weight.is_inference() for weight in model.parameters()):
        raise ConfigError(
            f"{what}: the model's weights were made inside torch.inference_mode(), so torch keeps "
            "no gradients through them; make or load the model outside of it"
        )


class GradientRuns:
    """Activations of a base and a source run, and the gradients of metrics between them.

    Attributes:
        difference: source - base per hook name; exactly zero where they are equal.
        gradient: d metric / d activation per hook name, one per metric.
        base_values, source_values: The metrics of both runs. [metric, batch]
    """

    def __init__(
        self,
        model: HookedModel,
        base: Tensor,
        source: Tensor,
        read_at: Tensor | None,
        mask: Tensor | None,
    ):
        self.model, self.base, self.source, self.mask = model, base, source, mask
        self.read_at = read_positions(base, read_at)
        self.difference: dict[str, Tensor] = {}
        self.gradient: dict[str, list[Tensor]] = {}
        self.base_values = self.source_values = torch.zeros(0)

    def names(self, site: Site) -> list[str]:
        """The hook names of a site; a per-position one has one for every position."""
        if not site.per_position:
            return [site.hook]
        return [f"{site.hook}.{t}" for t in range(self.base.shape[1])]

    def go(self, names: Sequence[str], metrics: Mapping[str, MetricFunction], steps: int) -> None:
        """Run both documents, and backward from the metrics; fills the attributes."""
        embeds = ["hook_embed"] if steps > 1 else []
        wanted = list(dict.fromkeys([*names, *embeds]))
        with torch.no_grad():
            logits, source = self.cached(self.source, wanted)
            self.source_values = measure_run(metrics, logits, "source")
            logits, base = self.cached(self.base, wanted)
            self.base_values = measure_run(metrics, logits, "base")
        for name in names:
            # -inf - -inf (masked scores) would be nan; equal values differ by nothing.
            same = source[name] == base[name]
            self.difference[name] = (source[name] - base[name]).masked_fill(same, 0)
        for gradients, _ in self.steps(names, metrics, steps, base, source):
            for name, found in gradients.items():
                so_far = self.gradient.get(name, [0.0] * len(found))
                self.gradient[name] = [a + g / steps for a, g in zip(so_far, found, strict=True)]

    def steps(
        self,
        names: Sequence[str],
        metrics: Mapping[str, MetricFunction],
        steps: int,
        base: Mapping[str, Tensor],
        source: Mapping[str, Tensor],
    ) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, Tensor]]]:
        """Run forward and backward once per step; yield gradients and activations by hook name.

        Args:
            steps: 1: the base run itself. More: runs whose embeddings lie between both.
            base, source: Hold both runs' "hook_embed" if there is more than one step.
        """
        for step in range(steps):
            hooks: list[Hook] = []
            if steps > 1:
                share = (step + 0.5) / steps
                between = torch.lerp(base["hook_embed"], source["hook_embed"], share)
                hooks.append(("hook_embed", lambda x, hook, between=between: between.clone()))
            yield self._gradients(names, metrics, hooks)

    def attribution(self, name: str, axes: list[int], which: int) -> Tensor:
        """Gradient times difference, summed over all axes but these, which come out in order."""
        product = _real_product(self.gradient[name][which], self.difference[name])
        in_front = product.movedim(axes, list(range(len(axes))))
        return in_front.flatten(len(axes)).sum(-1) if product.ndim > len(axes) else in_front

    def _logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, attention_mask=self.mask, logit_positions=self.read_at[:, None])[
            :, 0
        ]

    def cached(self, tokens: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits where they are read [batch, d_vocab], and activations by hook name."""
        cache, hooks, _ = self.model.get_caching_hooks(list(names))
        with self.model.hooks(fwd_hooks=hooks):
            return self._logits(tokens), cache

    def _gradients(
        self, names: Sequence[str], metrics: Mapping[str, MetricFunction], hooks: list[Hook]
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        nodes: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: HookPoint) -> Tensor:
            # A new tensor, so that whatever comes after is computed through this hook point.
            node = x.clone() if x.requires_grad else x.detach().clone().requires_grad_()
            nodes[str(hook.name)] = node
            return node

        with self.model.hooks(fwd_hooks=[*hooks, *((name, keep) for name in names)]):
            logits = self._logits(self.base)
            # one by one: in a stack, one with a gradient would lend it to one without
            values = [measure({name: f}, logits)[0] for name, f in metrics.items()]
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for which, (metric, value) in enumerate(zip(metrics, values, strict=True)):
            if not value.requires_grad:
                raise ConfigError(
                    f"metric {metric!r} has no gradient; take one that is smooth in the logits, "
                    "such as logit_difference, log_probability or kl"
                )
            gradients = torch.autograd.grad(
                value.sum(),
                [nodes[name] for name in names],
                retain_graph=which < len(metrics) - 1,
                allow_unused=True,
            )
            for name, gradient in zip(names, gradients, strict=True):
                found[name].append(
                    torch.zeros_like(nodes[name]) if gradient is None else gradient.detach()
                )
        return found, {name: node.detach() for name, node in nodes.items()}


def _real_product(gradient: Tensor, difference: Tensor) -> Tensor:
    """The change of the metric along a difference; complex: both parts count. Elementwise."""
    if not gradient.is_complex():
        return gradient * difference.to(gradient.dtype)
    return gradient.real * difference.real + gradient.imag * difference.imag


def _site_values(
    runs: GradientRuns, plan: Plan, columns: Mapping[str | int, Tensor], metrics: int
) -> Tensor:
    """The effects at one word's sites. [metric, layer, column(, head), batch]"""
    tables = []
    for which in range(metrics):
        rows = [_layer_values(runs, site, plan, columns, which) for site in plan.sites]
        tables.append(torch.stack(rows))
    return torch.stack(tables)


def _layer_values(
    runs: GradientRuns, site: Site, plan: Plan, columns: Mapping[str | int, Tensor], which: int
) -> Tensor:
    """[column, batch], or [column, head, batch]"""
    spec = site_spec(runs.model, site)
    head = plan.head_axis(spec)
    heads = [] if head is None else [head]
    if site.per_position:
        per_time = [runs.attribution(n, [0, *heads], which) for n in runs.names(site)]
        effects = torch.stack(per_time, dim=1)
    else:
        assert spec.position_axis is not None, "checked when the sweep was planned"
        effects = runs.attribution(site.hook, [0, spec.position_axis, *heads], which)
    if head is not None:
        effects = effects[:, :, plan.head_labels]  # [batch, pos, head]
    documents = torch.arange(len(effects), device=effects.device)[:, None]
    picked = [
        effects[documents, at.view(len(effects), -1)].sum(1) for at in columns.values()
    ]  # [batch(, head)] each
    return torch.stack(picked).movedim(1, -1)


@checked
def agreement(
    estimated: ActivationPatching, exact: ActivationPatching, metric: str | None = None
) -> pd.DataFrame:
    """Compare estimated effects with exactly patched ones, on the cells that both have.

    Args:
        estimated: From `attribution_patching`.
        exact: From `activation_patching`, of the same inputs; some layers or positions will do.
        metric: Which metric; the first if None.

    Returns:
        One row per site, and "all": cells, rank_correlation (Spearman's), max_error and
        mean_error of the mean effects, and largest_effect, to compare the errors with.

    Raises:
        ConfigError: No cell in common, or directions differ.
    """
    if estimated.direction != exact.direction:
        raise ConfigError(
            f"directions differ: {estimated.direction!r} estimated, {exact.direction!r} exact"
        )
    name = metric or estimated.metrics[0]
    keys = ["site", "layer", "position"]
    keys += ["head"] if "head" in estimated.frame and "head" in exact.frame else []
    both = pd.merge(
        *(r.frame[r.frame["metric"] == name][[*keys, "effect"]] for r in (estimated, exact)),
        on=keys,
        suffixes=("_estimated", "_exact"),
    )
    if both.empty:
        raise ConfigError(f"no cell of {name!r} in common: {keys} of the two differ everywhere")
    groups = [*both.groupby("site", sort=False), *([("all", both)])]
    return pd.DataFrame([{"site": site, **_compare(rows)} for site, rows in groups])


def _compare(cells: pd.DataFrame) -> dict[str, Any]:
    ours, exact = cells["effect_estimated"], cells["effect_exact"]
    error = (ours - exact).abs()
    return {
        "cells": len(cells),
        "rank_correlation": ours.rank().corr(exact.rank()),
        "max_error": error.max(),
        "mean_error": error.mean(),
        "largest_effect": exact.abs().max(),
    }
