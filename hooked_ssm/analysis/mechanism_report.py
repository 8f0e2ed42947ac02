"""One report on how a model recalls: behaviour, interchange, scores, and where it associates.

Runs unchanged on every architecture and on every task whose documents have a queried item in
context and its answer. The verdict is that of `mechanistic_evaluation`; beside it stands in which
layer, and in which part of its mixer, key and value are brought together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from hooked_ssm.analysis.induction import DetectionScores, detection_scores
from hooked_ssm.analysis.inside import Association, locate, restore_inside
from hooked_ssm.analysis.interchange import (
    KEY,
    QUERY,
    VALUE,
    MechanisticEvaluation,
    mechanistic_evaluation,
)
from hooked_ssm.errors import ConfigError, HookNameError, unknown
from hooked_ssm.model import HookedModel
from hooked_ssm.tasks import Task, TaskBatch

RELATIONS = {"association": (VALUE, KEY), "lookup": (QUERY, KEY), "retrieval": (QUERY, VALUE)}
"""Name -> (query position, key position). In associative recall these are the offsets of a
previous-token, a duplicate-token and an induction head."""

LARGEST_PATTERNS = 512 * 2**20
"""Bytes that the token-mixing matrices of one layer may take."""

Figure = Literal["inside", "sites", "association", "lookup", "retrieval"]


@dataclass(frozen=True)
class MechanismReport:
    """Result of `mechanism_report`.

    Attributes:
        evaluation: The mechanistic evaluation: every site and named position.
        inside: What restoring one thing inside a mixer gives back; see `restore_inside`.
        scores: Relation -> how much of each layer's mixing lies between the two positions, and
            what is lost without it. Empty where the matrices would be too large.
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

    def plot(self, figure: Figure = "inside") -> Any:
        """Return a plotly figure.

        Args:
            figure: "inside" (restoring one thing inside the mixers), "sites" (block, mixer and MLP
                inputs and outputs), or a relation's scores.

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
        rows = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.evidence)
        table = self.inside.pivot(index=["layer", "site"], columns="restore", values="attribution")
        table = table[list(dict.fromkeys(self.inside["restore"]))]
        order = dict.fromkeys(zip(self.inside["layer"], self.inside["site"], strict=True))
        return (
            f"<p><b>{self.mechanism}{timing}{where}</b></p><ul>{rows}</ul>"
            + table.loc[list(order)].round(2)._repr_html_()
        )


@torch.no_grad()
def mechanism_report(
    model: HookedModel,
    task: Task,
    n: int = 256,
    *,
    batch: TaskBatch | None = None,
    generator: torch.Generator | None = None,
    split: str = "test",
    controls: int = 2,
    max_batch: int = 512,
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

    Raises:
        TaskError: A task without a corruptible queried item in context.
    """
    task = task.single_query()
    generator = generator or torch.Generator().manual_seed(0)
    if batch is None:
        batch = task.sample(n, split, generator=generator)
    batch = batch.trim()
    was_training = model.training
    model.eval()
    try:
        evaluation = mechanistic_evaluation(
            model, task, batch=batch, generator=generator, max_batch=max_batch
        )
        device = model.embed.weight.device
        corrupted = task.corrupt(batch.to("cpu"), KEY, generator=generator).tokens.to(device)
        batch = batch.to(device)
        read_at = batch.positions[task.answer_position]
        layer = association_layer(evaluation.frame)
        inside = pd.concat(
            [
                restore_inside(model, batch, corrupted, at, read_at, max_batch=max_batch)
                for at in sorted({layer, len(model.blocks) - 1})
            ],
            ignore_index=True,
        )
        scores = _scores(model, batch, controls, generator)
    finally:
        model.train(was_training)
    association, where = locate(inside[inside["layer"] == layer])
    solved = evaluation.mechanism != "unsolved"
    return MechanismReport(
        evaluation,
        inside,
        scores,
        association if solved else "unsolved",
        layer if solved else None,
        _evidence(evaluation, where if solved else None, layer, scores),
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


def _scores(
    model: HookedModel, batch: TaskBatch, controls: int, generator: torch.Generator
) -> dict[str, DetectionScores]:
    """Scores of every relation, on as many documents as the matrices leave room for."""
    length = batch.tokens.shape[1]
    layers, documents = [], len(batch)
    for layer in range(len(model.blocks)):
        try:
            name = model.hook_name(layer, "pattern")
        except HookNameError:
            continue
        layers.append(layer)
        documents = min(documents, LARGEST_PATTERNS // model.cache_size(1, length, name))
    if not layers or documents < 2:
        return {}
    some, found = batch[:documents], {}
    for relation, ends in RELATIONS.items():
        targets = between(some, *ends)
        scores = detection_scores(
            model, targets, some, layers=layers, groups=4, causal=True, controls=controls,
            generator=generator,
        )  # fmt: skip
        found[relation] = replace(scores, kind=relation)
    return found


def between(batch: TaskBatch, query: str, key: str) -> Tensor:
    """Return the targets of a relation: one cell per document. [batch, query_pos, key_pos]

    None in documents where the key position lies behind the query position.
    """
    documents, length = batch.tokens.shape
    targets = torch.zeros(documents, length, length, dtype=torch.bool, device=batch.tokens.device)
    rows = torch.arange(documents, device=batch.tokens.device)
    at, of = batch.positions[query], batch.positions[key]
    targets[rows, at, of] = of <= at
    return targets


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
    for relation, (query, key) in RELATIONS.items():
        if relation in scores:
            found.append(_score_sentence(scores[relation], relation, query, key))
    return found


def _score_sentence(scores: DetectionScores, relation: str, query: str, key: str) -> str:
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
