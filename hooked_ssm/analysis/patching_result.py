"""What activation patching returns: values per document, statistics, a tidy frame, a heatmap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformer_lens.patching import PatchingResult

from hooked_ssm.analysis.contrast import contrast_words
from hooked_ssm.analysis.metrics import normalised_recovery
from hooked_ssm.checks import checked
from hooked_ssm.errors import HookNameError, unknown
from hooked_ssm.html_table import largest, titled_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

Shown = Literal["recovery", "effect", "value"]


@dataclass(frozen=True)
class SiteValues:
    """Everything measured at one site.

    Attributes:
        values: [metric, layer, pos, batch], or [metric, layer, pos, head, batch].
        layers: The layers that have the site.
        hooks: Its hook name in each of them.
        heads: The heads swept, None if whole activations were.
    """

    values: Tensor = field(repr=False)
    layers: list[int]
    hooks: list[str]
    heads: list[int] | None


@dataclass(frozen=True)
class ActivationPatching:
    """Result of `activation_patching`.

    Attributes:
        sites: What was measured, by site word.
        positions: Labels of the positions swept: indices, names, or ["all"].
        metrics: Names of the metrics.
        base: The metrics of the run that was patched, without a patch. [metric, batch]
        source: The metrics of the run whose activations were put in. [metric, batch]
        direction: "denoise" (base: corrupted, source: clean) or "noise" (the other way round).
        interrupted: Whether Ctrl-C ended the sweep early; cells not measured are NaN.
    """

    sites: dict[str, SiteValues]
    positions: list[str | int]
    metrics: list[str]
    base: Tensor = field(repr=False)
    source: Tensor = field(repr=False)
    direction: str
    interrupted: bool = False

    def result(self, site: str, metric: str | None = None) -> PatchingResult:
        """Return a site's values with transformer-lens' statistics.

        `stderr()`, `bootstrap_ci()`, `permutation_pvalue()`, `effect()` and `to_dataframe()` work
        on values [layer, pos(, head), batch]; `index_df` holds the labels of the cells.

        Raises:
            HookNameError: The site was not swept, or the metric not measured.
        """
        found, which = self._site(site), self._metric(metric)
        axes = ["layer", "pos", *(["head"] if found.heads else [])]
        labels: list[Sequence[Any]] = [found.layers, self.positions]
        labels += [found.heads] if found.heads else []
        return PatchingResult(
            values=found.values[which],
            axis_names=axes,
            index_df=pd.DataFrame(list(itertools.product(*labels)), columns=axes),
            metric_names=[self.metrics[which]],
            reduced=False,
            baseline=self.base[which],
        )

    def recovery(self, site: str, metric: str | None = None) -> Tensor:
        """(patched - base) / (source - base), means over documents first. [layer, pos(, head)]"""
        which = self._metric(metric)
        return normalised_recovery(
            self._site(site).values[which], self.base[which], self.source[which]
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per metric and cell: means over documents, their standard error, the recovery."""
        frames = []
        for (which, metric), site in itertools.product(enumerate(self.metrics), self.sites):
            result, found = self.result(site, metric), self.sites[site]
            cells = result.index_df.rename(columns={"pos": "position"})
            many = len(self.base[which]) > 1  # one document has no standard error
            columns: dict[str, Any] = {
                "value": result.mean(),
                "stderr": result.stderr() if many else torch.full_like(result.mean(), math.nan),
                "effect": result.effect().mean(-1),
                "recovery": self.recovery(site, metric),
            }
            frame = pd.DataFrame({"metric": metric, "site": site}, index=cells.index).join(cells)
            hooks = dict(zip(found.layers, found.hooks, strict=True))
            frame.insert(3, "hook", [hooks[layer] for layer in frame["layer"]])
            for name, values in columns.items():
                frame[name] = values.flatten().tolist()
            frame["base"] = self.base[which].mean().item()
            frame["source"] = self.source[which].mean().item()
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    @checked
    def heatmap(
        self,
        metric: str | None = None,
        *,
        show: Shown = "recovery",
        tokens: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> go.Figure:
        """Draw layer by position, one heatmap per site (and head); or layer by head.

        Args:
            metric: Which metric; the first if None.
            show: "recovery" (normalised), "effect" (change of the metric) or "value" (the metric).
            tokens: Labels of the positions, such as a document's tokens. [pos]
            kwargs: Passed on to `hooked_ssm.plots.patching_heatmap`.
        """
        from hooked_ssm.plots import patching_heatmap  # plotly is paid for on use

        if show not in ("recovery", "effect", "value"):
            raise HookNameError(unknown("show", show, ("recovery", "effect", "value")))
        layers = sorted({layer for found in self.sites.values() for layer in found.layers})
        # grouped queries: sites differ in how many heads they have, and share one axis
        heads = max((f.heads or [] for f in self.sites.values()), key=len)
        panels, by_head = {}, False
        for site, found in self.sites.items():
            shown = self._shown(site, metric, show)
            rows = shown.new_full((len(layers), *shown.shape[1:]), torch.nan)
            rows[[layers.index(layer) for layer in found.layers]] = shown
            if found.heads is None:
                panels[site] = rows
            elif len(self.positions) == 1:
                missing = (0, len(heads) - len(found.heads))
                panels[site], by_head = pad(rows[:, 0], missing, value=torch.nan), True
            else:
                for i, head in enumerate(found.heads):
                    panels[f"{site} head {head}"] = rows[:, :, i]
        labels = heads if by_head else self.positions
        which = self._metric(metric)
        name = self.metrics[which]
        means = contrast_words(self.base[which], self.source[which], self.direction)
        words = {"recovery": f"recovery of {name}", "effect": f"change of {name}", "value": name}
        named = {"value_name": words[show], "title": f"{name}, {show} ({means})"}
        named["x_title"] = "head" if by_head else "position"
        fig = patching_heatmap(
            panels, tokens, layers=[str(layer) for layer in layers], **{**named, **kwargs}
        )
        if tokens is None:
            fig.update_traces(x=[str(label) for label in labels])
        return fig

    def _shown(self, site: str, metric: str | None, show: str) -> Tensor:
        if show == "recovery":
            return self.recovery(site, metric)
        result = self.result(site, metric)
        return result.mean() if show == "value" else result.effect().mean(-1)

    def _site(self, site: str) -> SiteValues:
        if site not in self.sites:
            raise HookNameError(unknown("site", site, self.sites))
        return self.sites[site]

    def _metric(self, metric: str | None) -> int:
        if metric is None:
            return 0
        if metric not in self.metrics:
            raise HookNameError(unknown("metric", metric, self.metrics))
        return self.metrics.index(metric)

    def _repr_html_(self) -> str:
        sites, cells = ", ".join(self.sites), len(self.frame)
        detail = f"{self.direction}, {sites}; {cells} cells, the largest recoveries first"
        return titled_table("Activation patching", largest(self.frame, "recovery"), detail)
