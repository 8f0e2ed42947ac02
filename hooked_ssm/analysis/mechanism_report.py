"""One report on how a model recalls: behaviour, interchange, scores, and where it associates.

Runs unchanged on every architecture and on every task whose documents have a queried item in
context and its answer. The verdict is that of `mechanistic_evaluation`; beside it stands in which
layer, and in which part of its mixer, key and value are brought together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from hooked_ssm.analysis.documents import evaluation_batch
from hooked_ssm.analysis.induction import DetectionScores, detection_scores
from hooked_ssm.analysis.inside import (
    Association,
    locate,
    places,
    restore_inside,
    window_of,
)
from hooked_ssm.analysis.interchange import (
    KEY,
    QUERY,
    VALUE,
    MechanisticEvaluation,
    mechanistic_evaluation,
)
from hooked_ssm.checks import Count, checked
from hooked_ssm.errors import ConfigError, HookNameError, unknown
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm
from hooked_ssm.tasks import Task, TaskBatch
from hooked_ssm.tasks.base import Split

RELATIONS = {"association": (VALUE, KEY), "lookup": (QUERY, KEY), "retrieval": (QUERY, VALUE)}
"""Name -> (query position, key position). In associative recall these are the offsets of a
previous-token, a duplicate-token and an induction head."""

LARGEST_PATTERNS = 512 * 2**20
"""Bytes that the token-mixing matrices of one layer may take."""


@dataclass(frozen=True)
class MechanismReport:
    """Result of `mechanism_report`.

    Attributes:
        evaluation: The mechanistic evaluation: every site and named position.
        inside: What restoring one thing inside a mixer gives back; see `restore_inside`.
        scores: Relation -> how much of each layer's mixing lies between the two positions, and
            what is lost without it: those of `RELATIONS`, and "retrieval from key+3" or the like
            where a convolution made the association there. Empty where the matrices would be too
            large.
        association: In which part of the mixer key and value (or key and query) meet.
        layer: In which layer; None if unsolved.
        evidence: What the verdicts rest on, in sentences.
    """

    evaluation: MechanisticEvaluation = field(repr=False)
    inside: pd.DataFrame = field(repr=False)
    scores: dict[str, DetectionScores] = field(repr=False)
    association: Association
    layer: int | None
    evidence: list[str] = field(repr=False)

    @property
    def mechanism(self) -> str:
        """ "induction", "direct retrieval", "mixed" or "unsolved"."""
        return self.evaluation.mechanism

    @property
    def frame(self) -> pd.DataFrame:
        """All restorations in one frame: `part` is "block" (the evaluation) or "inside"."""
        parts = [self.evaluation.frame.assign(part="block"), self.inside.assign(part="inside")]
        return pd.concat(parts, ignore_index=True)

    def to_row(self) -> dict[str, Any]:
        """Return the verdicts and headline numbers as JSON values."""
        where = {"association": self.association, "association_layer": self.layer}
        return {**self.evaluation.to_row(), **where, "evidence": self.evidence}

    def plot(self, figure: str = "inside") -> Any:
        """Return a plotly figure.

        Args:
            figure: "inside" (restoring one thing inside the mixers), "sites" (block, mixer and MLP
                inputs and outputs), or one of `scores`.

        Raises:
            ConfigError: Another figure, or one that this report lacks.
        """
        from hooked_ssm import plots

        if figure == "inside":
            title = f"Inside the mixer: {self.mechanism}, {self.association}"
            return plots.site_restoration(self.inside, KEY, title=title)
        if figure == "sites":
            return plots.site_restoration(self.evaluation.frame, KEY)
        if figure not in self.scores:
            raise ConfigError(unknown("figure", figure, ["inside", "sites", *self.scores]))
        return self.scores[figure].plot()

    def _repr_html_(self) -> str:
        timing = f" ({self.evaluation.timing})" if self.evaluation.timing else ""
        where = "" if self.layer is None else f"; {self.association} of layer {self.layer}"
        table = self.inside.pivot(index=["layer", "site"], columns="restore", values="attribution")
        table = table[list(dict.fromkeys(self.inside["restore"]))]
        order = dict.fromkeys(zip(self.inside["layer"], self.inside["site"], strict=True))
        title = f"{self.mechanism}{timing}{where}"
        return titled_table(title, table.loc[list(order)].round(2), facts=self.evidence)


@checked
@torch.no_grad()
def mechanism_report(
    model: HookedModel,
    task: Task,
    n: Count = 256,
    *,
    batch: TaskBatch | None = None,
    generator: torch.Generator | None = None,
    split: Split = "test",
    controls: Count = 2,
    max_batch: Count = 512,
    progress: bool = False,
) -> MechanismReport:
    """Say how a model recalls, and what that rests on.

    Args:
        model: Any `HookedModel`; its mode (train or eval) is kept.
        task: Its `single_query()` documents are used.
        n: How many documents.
        batch: Documents to use instead of drawing n.
        generator: Draws documents, corruptions and controls; seed 0 if None.
        split: The task's split to draw from.
        controls: Resampled removals per score.
        max_batch: Most documents in one forward.
        progress: Show progress bars.

    Raises:
        TaskError: A task without a corruptible queried item in context.
    """
    task = task.single_query()
    generator = generator or torch.Generator().manual_seed(0)
    batch = evaluation_batch(model, task, batch, n, split, generator)
    was_training = model.training
    model.eval()
    try:
        evaluation = mechanistic_evaluation(
            model, task, batch=batch, generator=generator, max_batch=max_batch, progress=progress
        )
        corrupted = task.corrupt(batch.to("cpu"), KEY, generator=generator).tokens
        corrupted = corrupted.to(batch.tokens.device)
        read_at = batch.positions[task.answer_position]
        layer = association_layer(evaluation.frame)
        chosen = sorted({layer, len(model.blocks) - 1})
        inside = pd.concat(
            [
                restore_inside(model, batch, corrupted, at, read_at, max_batch=max_batch)
                for at in tqdm(chosen, disable=not progress, desc="inside layers")
            ],
            ignore_index=True,
        )
        located = locate(inside[inside["layer"] == layer])
        solved = evaluation.mechanism != "unsolved"
        place = located.place if solved else None
        relations = _relations(model, batch, read_at, layer, place)
        scores = _scores(model, batch, relations, controls, generator, progress)
    finally:
        model.train(was_training)
    return MechanismReport(
        evaluation,
        inside,
        scores,
        located.association if solved else "unsolved",
        layer if solved else None,
        _evidence(evaluation, located.evidence if solved else None, layer, scores),
    )


def association_layer(frame: pd.DataFrame) -> int:
    """Return the layer in which the key's own place loses most of the answer.

    Args:
        frame: Of a mechanistic evaluation over all block-level sites.
    """
    at_key = frame[
        (frame["corrupt"] == KEY) & (frame["direction"] == "restore") & (frame["restore"] == KEY)
    ].pivot(index="layer", columns="site", values="attribution")
    return int((at_key["resid_pre"] - at_key["resid_post"]).idxmax())


def _relations(
    model: HookedModel, batch: TaskBatch, read_at: Tensor, layer: int, place: str | None
) -> dict[str, Tensor]:
    """Targets of every relation, and of reading the place where a convolution associates."""
    length, at = batch.tokens.shape[1], batch.positions
    found = {name: between(at[q], at[k], length) for name, (q, k) in RELATIONS.items()}
    if place not in (None, "value"):
        where = places(batch, window_of(model, layer), read_at)[place]
        found[f"retrieval from {place}"] = between(at[QUERY], where, length)
    return found


def between(query: Tensor, key: Tensor, length: int) -> Tensor:
    """Return one target per document: none where the key position lies behind the query position.

    Args:
        query, key: Positions. [batch]

    Returns:
        [batch, query_pos, key_pos]
    """
    targets = torch.zeros(len(query), length, length, dtype=torch.bool, device=query.device)
    targets[torch.arange(len(query), device=query.device), query, key] = key <= query
    return targets


def _scores(
    model: HookedModel,
    batch: TaskBatch,
    relations: dict[str, Tensor],
    controls: int,
    generator: torch.Generator,
    progress: bool,
) -> dict[str, DetectionScores]:
    """Scores of every relation, on as many documents as the matrices leave room for."""
    layers, documents = [], len(batch)
    for layer in range(len(model.blocks)):
        try:
            name = model.hook_name(layer, "pattern")
        except HookNameError:  # BaseConv with activations has no matrix
            continue
        layers.append(layer)
        size = model.cache_size(1, batch.tokens.shape[1], name)
        documents = min(documents, LARGEST_PATTERNS // size)
    if not layers or documents < 2:
        return {}
    found = {}
    for relation, targets in tqdm(relations.items(), disable=not progress, desc="relations"):
        scores = detection_scores(
            model, targets[:documents], batch[:documents], layers=layers, groups=4, causal=True,
            controls=controls, generator=generator,
        )  # fmt: skip
        found[relation] = replace(scores, kind=relation)
    return found


def _evidence(
    evaluation: MechanisticEvaluation,
    where: str | None,
    layer: int,
    scores: dict[str, DetectionScores],
) -> list[str]:
    frame = evaluation.frame
    original = frame["original"].iloc[0]
    shares = ", ".join(f"{v:.2f} at the {k}" for k, v in evaluation.attribution.items())
    found = [
        f"Accuracy {evaluation.accuracy:.3f} (chance {evaluation.chance:.3f}), probability of the "
        f"answer {original:.3f}."
    ]
    if where is None:
        return [
            *found,
            "Below half way from chance to 1 the task is unsolved: attributions and scores are of "
            "a model that does not do it, and name no mechanism.",
        ]
    found.append(
        f"With the key corrupted, restoring the input of the last block gives back {shares}: "
        f"{evaluation.mechanism}{f' ({evaluation.timing})' if evaluation.timing else ''}."
    )
    found.append(f"The key's own place loses most of it in layer {layer}. {where}")
    return [*found, *(_score_sentence(relation, score) for relation, score in scores.items())]


def _score_sentence(relation: str, scores: DetectionScores) -> str:
    query, key = RELATIONS.get(relation, (QUERY, relation.removeprefix("retrieval from ")))
    rows = scores.frame[scores.frame["unit"].isin(["head", "layer"])]
    by_head = rows.loc[rows["unit"] == "head", "layer"]
    rows = rows[(rows["unit"] == "head") | ~rows["layer"].isin(by_head)]
    most = rows.loc[rows["drop"].idxmax()]
    head = f", head {most['index']}," if most["unit"] == "head" else ""
    return (
        f"{relation.capitalize()}: layer {most['layer']}{head} has {most['score']:.2f} of its "
        f"mixing from {query} to {key} (chance {most['chance']:.2f}); without it the answer loses "
        f"{most['drop']:.2f} of its probability (without others {most['control_drop']:.2f})."
    )
