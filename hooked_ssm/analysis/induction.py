"""Previous-token, duplicate-token and induction scores: by pattern, and by what breaks without it.

By pattern: how much of a head's or channel's mixing lies at the offsets of that kind. Causally:
how much in-context copying is lost when the mixing at exactly those offsets is set to zero through
the pattern hook, beside the loss when equally many other offsets are. Any layer of any mixer that
has a token-mixing matrix: softmax attention, convolutions, recurrences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_ssm.analysis.detection import (
    Kind,
    Measure,
    chance_scores,
    counted,
    detection_pattern,
    pattern_scores,
    resampled,
)
from hooked_ssm.analysis.documents import Documents, Given, as_documents, behaviour, mean_and_error
from hooked_ssm.analysis.sites import chosen_layers
from hooked_ssm.analysis.token_mixing import token_mixing
from hooked_ssm.checks import Count, Indices, checked
from hooked_ssm.errors import ConfigError, HookNameError, unknown
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm

Queries = Literal["with_target", "all"] | Bool[Tensor, "batch query_pos"]


@dataclass(frozen=True)
class DetectionScores:
    """Result of `induction_scores` and its relatives.

    Attributes:
        kind: Of which head.
        frame: One row per layer ("layer": all of it, each head or channel counting as much as it
            moves, without its sign), group of channels ("group", likewise) and head or channel
            (signed), with columns layer, unit, index, score and error (mean over documents and its
            standard error), chance (of a uniform causal pattern). With causal=True also drop,
            drop_error (lost probability of the answers), accuracy_drop, and control_drop,
            control_error (the same where other offsets were removed); NaN for single channels,
            which are ablated in groups.
        probability, accuracy: Of the answers, with nothing removed; NaN without causal=True.
    """

    kind: str
    frame: pd.DataFrame = field(repr=False)
    probability: float = float("nan")
    accuracy: float = float("nan")

    def best(self, layer: int | None = None, unit: str | None = None) -> pd.Series:
        """Return the row with the highest score, of one layer and kind of unit if given.

        Raises:
            ConfigError: No row is of that layer, or of that kind of unit.
        """
        rows = self.frame
        for name, wanted in (("layer", layer), ("unit", unit)):
            if wanted is None:
                continue
            if wanted not in rows[name].tolist():
                raise ConfigError(unknown(name, wanted, rows[name].unique()))
            rows = rows[rows[name] == wanted]
        return rows.iloc[int(rows["score"].argmax())]

    def plot(self, *, units: Sequence[str] = ("head", "group")) -> Any:
        """Return a plotly figure: score bars per head or channel group, with chance."""
        from hooked_ssm.plots.scores import score_bars

        return score_bars(self.frame, units=units, title=f"{_title(self.kind)} scores")

    def _repr_html_(self) -> str:
        rows = self.frame[self.frame["unit"] != "channel"]
        return titled_table(f"{_title(self.kind)} scores", rows)


def induction_scores(
    model: HookedModel, documents: Given = None, **options: Any
) -> DetectionScores:
    """Score how much each head or channel reads what came after an earlier copy of its token.

    Arguments as in `detection_scores`.
    """
    return detection_scores(model, "induction", documents, **options)


def previous_token_scores(
    model: HookedModel, documents: Given = None, **options: Any
) -> DetectionScores:
    """Score how much each head or channel reads the token before. See `detection_scores`."""
    return detection_scores(model, "previous_token", documents, **options)


def duplicate_token_scores(
    model: HookedModel, documents: Given = None, **options: Any
) -> DetectionScores:
    """Score how much each head or channel reads earlier copies of its own token.

    Arguments as in `detection_scores`.
    """
    return detection_scores(model, "duplicate_token", documents, **options)


@checked
@torch.no_grad()
def detection_scores(
    model: HookedModel,
    kind: Kind | Bool[Tensor, "batch query_pos key_pos"],
    documents: Given = None,
    *,
    layers: Indices | None = None,
    queries: Queries = "with_target",
    groups: Count = 8,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    measure: Measure = "mul",
    causal: bool = False,
    controls: Count = 4,
    n: Count = 64,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> DetectionScores:
    """Score every head and channel of every layer by where its mixing lies, and what that does.

    Args:
        model: Any `HookedModel`; its mode (train or eval) is kept.
        kind: "previous_token", "duplicate_token", "induction", or targets of your own.
        documents: A task (n documents are drawn), a batch, tokens, or None for repeated random
            sequences; see `hooked_ssm.analysis.documents.as_documents`.
        layers: Which layers; None: all that have a token-mixing matrix.
        queries: Which rows count, see `pattern_scores`; the causal removal is in the same rows.
        groups: In how many groups of consecutive channels the channels of a mixer are taken.
        exclude_bos, exclude_current_token, measure: See `pattern_scores`.
        causal: Remove the mixing and measure what is lost.
        controls: How many times other offsets are drawn, as many per query.
        n: Documents to draw.
        generator: Draws documents and other offsets; seed 0 if None.
        progress: Show a progress bar.

    Raises:
        HookNameError: A layer asked for has no token-mixing matrix.
    """
    generator = generator or torch.Generator().manual_seed(0)
    found = as_documents(model, documents, n, generator)
    targets = detection_pattern(found.tokens, kind) if isinstance(kind, str) else kind
    targets = targets.to(found.tokens.device)
    rows = counted(targets, queries)
    if found.mask is not None:
        rows = rows & found.mask
    layers = _layers(model, layers)
    was_training = model.training
    model.eval()
    try:
        frame = _pattern_frame(
            model, found, targets, layers, groups, progress,
            {
                "queries": rows,
                "exclude_bos": exclude_bos,
                "exclude_current_token": exclude_current_token,
                "measure": measure,
            },
        )  # fmt: skip
        name = kind if isinstance(kind, str) else "targets"
        if not causal:
            return DetectionScores(name, frame)
        removal = _Removal(model, found)
        removed = targets & rows[:, :, None]
        lost = [
            removal.lost(part, removed, controls, generator)
            for part in tqdm(
                list(_parts(model, layers, groups)), disable=not progress, desc="removals"
            )
        ]
        frame = frame.merge(pd.DataFrame(lost), how="left", on=["layer", "unit", "index"])
        return DetectionScores(name, frame, *(mean_and_error(x)[0] for x in removal.whole))
    finally:
        model.train(was_training)


class _Part(NamedTuple):
    """Some heads or channels of a layer."""

    layer: int
    unit: str
    number: int
    units: slice


def _layers(model: HookedModel, layers: Sequence[int] | None) -> list[int]:
    if layers is not None:
        return chosen_layers(model, layers)
    found = []
    for layer in range(len(model.blocks)):
        try:
            model.hook_name(layer, "pattern")
        except HookNameError:  # BaseConv with activations has no matrix
            continue
        found.append(layer)
    return found


def _parts(model: HookedModel, layers: list[int], groups: int) -> Iterator[_Part]:
    """Whole layers, and their heads or groups of channels."""
    for layer in layers:
        yield _Part(layer, "layer", 0, slice(None))
        axis = model.find_hook(model.hook_name(layer, "pattern")).spec.axes[1]
        units = model.blocks[layer].mixer.axis_sizes()[axis]
        kind, count = ("head", units) if axis == "head" else ("group", min(groups, units))
        for index, part in enumerate(torch.arange(units).tensor_split(count)):
            yield _Part(layer, kind, index, slice(int(part[0]), int(part[-1]) + 1))


def _pattern_frame(
    model: HookedModel,
    documents: Documents,
    targets: Tensor,
    layers: list[int],
    groups: int,
    progress: bool,
    how: dict[str, Any],
) -> pd.DataFrame:
    chance = mean_and_error(chance_scores(targets, **how))[0]
    table: list[dict[str, Any]] = []
    parts = list(_parts(model, layers, groups))
    for layer in tqdm(layers, disable=not progress, desc="layers"):
        mixing = token_mixing(model, documents.tokens, layer, attention_mask=documents.mask)
        moved = mixing.reduce("norm")
        for part in parts:
            if part.layer == layer and part.unit != "head":
                pooled = pattern_scores(moved[:, part.units], targets, pool=True, **how)
                table.append(_row(layer, part.unit, part.number, pooled[:, 0], chance))
        single = pattern_scores(mixing.matrix, targets, **how)
        table += [
            _row(layer, mixing.unit, index, score, chance)
            for index, score in enumerate(single.unbind(1))
        ]
    return pd.DataFrame(table)


def _row(layer: int, unit: str, index: int, score: Tensor, chance: float) -> dict[str, Any]:
    mean, error = mean_and_error(score)
    return {
        "layer": layer, "unit": unit, "index": index, "score": mean, "error": error,
        "chance": chance,
    }  # fmt: skip


class _Removal:
    """Runs with some of a layer's mixing set to zero, from the residual stream that enters it."""

    def __init__(self, model: HookedModel, documents: Documents):
        self.model, self.documents = model, documents
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(len(model.blocks))]
        logits, cache = model.run_with_cache(
            documents.tokens,
            names_filter=names,
            attention_mask=documents.mask,
            logit_positions=documents.asked,
            return_cache_object=False,
        )
        self.resid = [cache[name] for name in names]
        self.whole = behaviour(logits, documents)

    def lost(
        self, part: _Part, removed: Tensor, controls: int, generator: torch.Generator
    ) -> dict[str, Any]:
        """What is lost without the mixing at `removed`, and at others. [batch, query, key]"""
        without = self._without(part, removed)
        drop, error = mean_and_error(self.whole.probability - without.probability)
        accuracy_drop, _ = mean_and_error(self.whole.accuracy - without.accuracy)
        others = [self._without(part, resampled(removed, generator)) for _ in range(controls)]
        control = torch.stack([self.whole.probability - o.probability for o in others]).mean(0)
        control_drop, control_error = mean_and_error(control)
        return {
            "layer": part.layer, "unit": part.unit, "index": part.number,
            "drop": drop, "drop_error": error, "accuracy_drop": accuracy_drop,
            "control_drop": control_drop, "control_error": control_error,
        }  # fmt: skip

    def _without(self, part: _Part, removed: Tensor) -> Any:
        def remove(pattern: Tensor, hook: object) -> Tensor:
            pattern = pattern.clone()
            pattern[:, part.units] = pattern[:, part.units].masked_fill(removed[:, None], 0)
            return pattern

        logits = self.model.run_with_hooks(
            self.resid[part.layer],
            fwd_hooks=[(self.model.hook_name(part.layer, "pattern"), remove)],
            start_at_layer=part.layer,
            attention_mask=self.documents.mask,
            logit_positions=self.documents.asked,
        )
        return behaviour(logits, self.documents)


def _title(kind: str) -> str:
    return kind.replace("_", "-").capitalize()
