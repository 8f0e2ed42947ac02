"""The paper's mechanistic evaluation: where is the answer restored, so how does the model recall?

Corrupt one token of each document, run it, but put back one activation of the original run at one
named position. What comes back of the original answer's probability is the site's attribution.
Source: arXiv 2505.15105, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import Tensor

from hooked_ssm.analysis.documents import evaluation_batch
from hooked_ssm.analysis.engine import Cell, Interchange
from hooked_ssm.analysis.sites import Site, block_sites, find_site, find_sites
from hooked_ssm.checks import Count, Indices, checked
from hooked_ssm.errors import TaskError, unknown
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm
from hooked_ssm.tasks import Task, TaskBatch
from hooked_ssm.tasks.base import Split

Direction = Literal["restore", "corrupt"]
Mechanism = Literal["induction", "direct retrieval", "mixed", "unsolved"]

KEY, VALUE, QUERY = "query_item_orig", "target_item_orig", "query_item"
POSITIONS = (KEY, VALUE, "divider", QUERY)
HEADLINE = {"key": KEY, "query": QUERY, "value": VALUE}
STRONG, WEAK = 0.75, 0.25


@dataclass(frozen=True)
class MechanisticEvaluation:
    """Result of `mechanistic_evaluation`.

    Attributes:
        frame: One row per corruption, direction, site, layer and restored position, with columns
            corrupt, direction, site, layer, hook, restore, original, corrupted, restored (means of
            the original answer's probability), attribution and attribution_error (its standard
            error over documents), restored_logit, kl (from the unpatched to the patched
            distribution), best_position (share of documents that this position restores most,
            among positions of the same site and layer) and best_layer (likewise among layers).
        accuracy: Share of the original documents whose answer is the most likely token.
        chance: Accuracy of guessing among the values in the document.
        attribution: At the headline site (input of the last block, key corrupted, restoring):
            {"key", "query", "value"}.
        attribution_error: Their standard errors.
        mechanism: The verdict, see `verdict`.
        timing: For direct retrieval: "early" (an earlier block already brought the answer to the
            query) or "late" (the last block looks it up); else None.
    """

    frame: pd.DataFrame = field(repr=False)
    accuracy: float
    chance: float
    attribution: dict[str, float]
    attribution_error: dict[str, float]
    mechanism: Mechanism
    timing: str | None

    def to_row(self) -> dict[str, Any]:
        """Return what results.json holds of it."""
        return {
            "accuracy": self.accuracy,
            "chance": self.chance,
            "attribution": self.attribution,
            "attribution_error": self.attribution_error,
            "mechanism": self.mechanism,
            "timing": self.timing,
        }

    def _repr_html_(self) -> str:
        shares = ", ".join(f"@ {k.title()} {v:.3f}" for k, v in self.attribution.items())
        when = f" ({self.timing})" if self.timing else ""
        detail = f"accuracy {self.accuracy:.3f} (chance {self.chance:.3f}); attribution {shares}"
        return titled_table(f"{self.mechanism}{when}", self.frame, detail)


def verdict(
    accuracy: float, chance: float, attribution: dict[str, float]
) -> tuple[Mechanism, str | None]:
    """Name the mechanism that the headline attributions show.

    - "unsolved": accuracy is below half way from chance to 1, so attributions are noise.
    - "induction": @ Value >= 0.75 and @ Key + @ Query <= 0.25: the association is stored at the
      value before the last block.
    - "direct retrieval": @ Value <= 0.25 and @ Key + @ Query >= 0.75: it is looked up in one layer;
      "early" if @ Query is the larger part, "late" if @ Key is.
    - "mixed": anything else.
    """
    direct = attribution["key"] + attribution["query"]
    if accuracy < (1 + chance) / 2:
        return "unsolved", None
    if attribution["value"] >= STRONG and direct <= WEAK:
        return "induction", None
    if attribution["value"] <= WEAK and direct >= STRONG:
        early = attribution["query"] > attribution["key"]
        return "direct retrieval", "early" if early else "late"
    return "mixed", None


@checked
@torch.no_grad()
def mechanistic_evaluation(
    model: HookedModel,
    task: Task,
    n: Count = 256,
    *,
    generator: torch.Generator | None = None,
    batch: TaskBatch | None = None,
    split: Split = "test",
    sites: Sequence[str] | None = None,
    layers: Indices | None = None,
    corruptions: Sequence[str] | None = None,
    positions: Sequence[str] = POSITIONS,
    directions: Sequence[str] = ("restore",),
    max_batch: Count = 512,
    progress: bool = False,
) -> MechanisticEvaluation:
    """Corrupt, restore, and read how the model recalls; for any model, task and site.

    attribution = (restored - corrupted) / (original - corrupted), means over documents taken first.
    With direction "corrupt" the original document is run with one activation of the corrupted
    run put in, and attribution = (original - restored) / (original - corrupted): what is
    necessary, beside what is sufficient.

    Args:
        model: Any `HookedModel`; its mode (train or eval) is kept.
        task: Its `single_query()` documents are evaluated.
        n: How many documents.
        generator: Draws documents and corruptions; seed 0 if None.
        batch: Documents to use instead of drawing n.
        split: The task's split to draw from.
        sites: Block-level words or roles (see `find_site`), such as "resid_pre", "conv", "carry";
            None: inputs and outputs of every block, mixer and MLP there is.
        layers: Which layers; all if None.
        corruptions: Positions whose token is replaced; all that the task can corrupt if None.
        positions: Named positions where an activation is put back.
        directions: "restore" into the corrupted run ("denoise" in `activation_patching`),
            "corrupt" the original run ("noise" there), or both.
        max_batch: Most documents in one forward.
        progress: Show a progress bar.

    Raises:
        TaskError: An unknown position, corruption or direction.
        HookNameError: A site that no layer has.
    """
    task = task.single_query()
    generator = generator or torch.Generator().manual_seed(0)
    batch = evaluation_batch(model, task, batch, n, split, generator)
    corruptions = task.corruptions if corruptions is None else corruptions
    _check(positions, batch.positions, "position")
    _check(directions, get_args(Direction), "direction")
    if KEY not in corruptions:
        raise TaskError(f"corruptions must hold {KEY!r}: the headline attributions need it")
    if "restore" not in directions:
        raise TaskError("directions must hold 'restore': the headline attributions need it")
    found = block_sites(model, layers) if sites is None else find_sites(model, sites, layers)
    headline = find_site(model, len(model.blocks) - 1, "resid_pre")
    run = _Run(model, batch, batch.positions[task.answer_position], positions, max_batch)
    was_training = model.training
    model.eval()
    try:
        frames = []
        for corrupt in tqdm(corruptions, disable=not progress, desc="corruptions"):
            changed = task.corrupt(batch.to("cpu"), corrupt, generator=generator)
            tokens = changed.tokens.to(batch.tokens.device)
            for direction in directions:
                wanted = [*found, headline] if _is_headline(corrupt, direction) else found
                frames.append(run.frame(tokens, corrupt, direction, list(dict.fromkeys(wanted))))
    finally:
        model.train(was_training)
    return _summarise(pd.concat(frames, ignore_index=True), run, headline, task, found)


class _Run:
    """The original run, and what patched runs are compared with."""

    def __init__(
        self,
        model: HookedModel,
        batch: TaskBatch,
        read_at: Tensor,
        positions: Sequence[str],
        max_batch: int,
    ):
        self.model, self.batch, self.read_at, self.max_batch = model, batch, read_at, max_batch
        named = dict.fromkeys([*positions, *HEADLINE.values()])
        self.positions = {name: batch.positions[name] for name in named}
        self.mask = None if bool(batch.mask.all()) else batch.mask
        self.accuracy = float("nan")

    def frame(
        self, corrupted: Tensor, corrupt: str, direction: str, sites: list[Site]
    ) -> pd.DataFrame:
        restoring = direction == "restore"
        base, source = (
            (corrupted, self.batch.tokens) if restoring else (self.batch.tokens, corrupted)
        )
        engine = Interchange(
            self.model,
            base,
            source,
            self.read_at,
            attention_mask=self.mask,
            max_batch=self.max_batch,
        )
        other = self.model(source, attention_mask=self.mask, logit_positions=self.read_at[:, None])[
            :, 0
        ]
        before = {"restore": (other, engine.base_logits), "corrupt": (engine.base_logits, other)}
        original, changed = (self._probability(logits) for logits in before[direction])
        self.accuracy = self._share_right(before[direction][0])
        cells = [Cell(site, at) for site in sites for at in self.positions.values()]
        labels = [(site, name) for site in sites for name in self.positions]
        base_log = torch.log_softmax(engine.base_logits, dim=-1)
        base_odds = base_log.exp()
        probability = original.new_empty(len(cells), len(original))
        logit, kl = probability.clone(), probability.clone()
        for group, logits in engine.run(cells):
            log = torch.log_softmax(logits, dim=-1)
            answer = self.batch.answer.expand(len(group), -1)[..., None]
            probability[group] = log.gather(-1, answer)[..., 0].double().exp()
            logit[group] = logits.gather(-1, answer)[..., 0].double()
            kl[group] = (base_odds * (base_log - log)).sum(-1).double()
        gain = probability - changed if restoring else original - probability
        attribution, error = _ratio(gain, original - changed)
        frame = pd.DataFrame(
            {
                "corrupt": corrupt,
                "direction": direction,
                "site": [site.word for site, _ in labels],
                "layer": [site.layer for site, _ in labels],
                "hook": [site.hook for site, _ in labels],
                "restore": [name for _, name in labels],
                "original": original.mean().item(),
                "corrupted": changed.mean().item(),
                "restored": probability.mean(1).tolist(),
                "attribution": attribution.tolist(),
                "attribution_error": error.tolist(),
                "restored_logit": logit.mean(1).tolist(),
                "kl": kl.mean(1).tolist(),
            }
        )
        frame["best_position"] = _best_share(frame, gain, ["site", "layer"])
        frame["best_layer"] = _best_share(frame, gain, ["site", "restore"])
        return frame

    def _probability(self, logits: Tensor) -> Tensor:
        log = torch.log_softmax(logits, dim=-1)
        return log.gather(-1, self.batch.answer[:, None])[:, 0].double().exp()

    def _share_right(self, logits: Tensor) -> float:
        return (logits.argmax(-1) == self.batch.answer).double().mean().item()


def _ratio(gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Ratio of means over documents, and its standard error by the delta method. [cell]"""
    ratio = gain.mean(1) / scale.mean()
    spread = (gain - ratio[:, None] * scale) / scale.mean()
    n = len(scale)
    error = spread.std(1) / n**0.5 if n > 1 else torch.full_like(ratio, float("nan"))
    return ratio, error


def _best_share(frame: pd.DataFrame, gain: Tensor, by: list[str]) -> pd.Series:
    """Share of documents in which each cell gains most among the cells of its group."""
    share = pd.Series(0.0, index=frame.index)
    for rows in frame.groupby(by, sort=False).indices.values():
        best = gain[rows.tolist()].argmax(0)
        counts = torch.bincount(best, minlength=len(rows)).double() / gain.shape[1]
        share.iloc[rows] = counts.tolist()
    return share


def _is_headline(corrupt: str, direction: str) -> bool:
    return corrupt == KEY and direction == "restore"


def _summarise(
    frame: pd.DataFrame, run: _Run, headline: Site, task: Task, found: list[Site]
) -> MechanisticEvaluation:
    at_headline = frame[
        (frame["corrupt"] == KEY)
        & (frame["direction"] == "restore")
        & (frame["hook"] == headline.hook)
    ].set_index("restore")
    attribution = {name: float(at_headline["attribution"][at]) for name, at in HEADLINE.items()}
    error = {name: float(at_headline["attribution_error"][at]) for name, at in HEADLINE.items()}
    mechanism, timing = verdict(run.accuracy, task.chance, attribution)
    asked = frame[frame["hook"].isin([site.hook for site in found])].reset_index(drop=True)
    return MechanisticEvaluation(
        frame=asked,
        accuracy=run.accuracy,
        chance=task.chance,
        attribution=attribution,
        attribution_error=error,
        mechanism=mechanism,
        timing=timing,
    )


def _check(given: Sequence[str], allowed: Any, kind: str) -> None:
    if isinstance(given, str) or not given:
        raise TaskError(f"{kind}s must be a non-empty list, got {given!r}")
    for name in given:
        if name not in allowed:
            raise TaskError(unknown(kind, name, allowed))
