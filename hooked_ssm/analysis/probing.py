"""Linear probes: what can be read, linearly, from any site at any position; with its control.

Accuracy is that of logistic regression on documents it was not fitted on. The control is the same
probe on shuffled labels: what it reaches is what the probe can do by itself, and selectivity, the
difference, is what is in the activation. Source: Hewitt & Liang 2019.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hooked_ssm.analysis.activations import activations_at
from hooked_ssm.analysis.documents import evaluation_batch
from hooked_ssm.analysis.interchange import KEY, QUERY, VALUE
from hooked_ssm.analysis.sites import Site, find_sites
from hooked_ssm.checks import Count, Indices, Positive, Seed, Words, checked
from hooked_ssm.errors import ConfigError, TaskError, unknown
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm
from hooked_ssm.rules import Rule
from hooked_ssm.tasks import Task, TaskBatch
from hooked_ssm.tasks.base import Split

TARGETS = {"key": KEY, "value": VALUE, "answer": None}
"""What can be probed for: the token at a named position, or the answer."""

NUMBERS = ("accuracy", "error", "control", "selectivity", "majority", "features", "documents")
"""The frame's columns that say what came out."""

Folds = Annotated[int, Rule("an integer >= 2", lambda value: value >= 2)]


@dataclass(frozen=True)
class ProbeResults:
    """Result of `linear_probes`.

    Attributes:
        frame: One row per site, layer, position and target, with columns site, layer, hook,
            position, target, accuracy and error (mean over folds and its standard error), control
            (accuracy on shuffled labels), selectivity (accuracy - control), majority (accuracy of
            always giving the commonest label), features, documents.
    """

    frame: pd.DataFrame = field(repr=False)

    def table(self, target: str, column: str = "selectivity") -> pd.DataFrame:
        """Return one column for one target: (layer, site) down, positions across.

        Raises:
            ConfigError: Another target or column than the frame has.
        """
        if column not in NUMBERS:
            raise ConfigError(unknown("column", column, NUMBERS))
        rows = self.frame[self.frame["target"] == target]
        if rows.empty:
            raise ConfigError(unknown("target", target, self.frame["target"].unique()))
        table = rows.pivot(index=["layer", "site"], columns="position", values=column)
        order = list(dict.fromkeys(zip(rows["layer"], rows["site"], strict=True)))
        return table.loc[order, list(dict.fromkeys(rows["position"]))]

    def plot(self, target: str = "answer", column: str = "selectivity") -> Any:
        """Return a plotly heatmap: (layer, site) down, positions across."""
        from hooked_ssm import plots

        table = self.table(target, column)
        return plots.heatmap(
            table.to_numpy(),
            rows=[f"L{layer} {site}" for layer, site in table.index],
            cols=list(table.columns),
            title=f"Linear probes for the {target}",
            x_title="position",
            y_title="layer and site",
            value_name=column,
            range=(-1.0, 1.0),
        )

    def _repr_html_(self) -> str:
        return titled_table("Linear probes", self.frame)


@checked
def linear_probes(
    model: HookedModel,
    task: Task,
    sites: Words = ("resid_pre", "resid_post"),
    *,
    positions: Words = (KEY, VALUE, "divider", QUERY),
    targets: Words = ("key", "answer"),
    layers: Indices | None = None,
    n: Count = 512,
    batch: TaskBatch | None = None,
    split: Split = "test",
    folds: Folds = 5,
    C: Positive = 1.0,
    max_iter: Count = 200,
    seed: Seed = 0,
    progress: bool = False,
) -> ProbeResults:
    """Fit linear probes on the activations of every site at every position.

    Args:
        model: Any `HookedModel`; run in eval mode, its own mode is kept.
        task: Its `single_query()` documents are used.
        sites: Block-level words, roles or hook words (see `find_site`), the carried state
            ("carry") included.
        positions: Named positions.
        targets: "key" (the token at query_item_orig), "value" (at target_item_orig), "answer".
        layers: Which layers; all if None.
        n: How many documents; `batch` instead of drawing them.
        split: The task's split to draw from.
        folds: Of the cross-validation.
        C, max_iter: Of `sklearn.linear_model.LogisticRegression`; features are standardised.
        seed: Draws documents, folds and the shuffled labels.
        progress: Show a progress bar.

    Raises:
        TaskError: An unknown position or target, too few documents for the folds, or documents
            of which some fold has nothing to tell apart.
        HookNameError: A site that no layer has.
    """
    task = task.single_query()
    generator = torch.Generator().manual_seed(seed)
    batch = evaluation_batch(model, task, batch, n, split, generator)
    for kind, given, allowed in (
        ("position", positions, batch.positions), ("target", targets, TARGETS)
    ):  # fmt: skip
        for name in given:
            if name not in allowed:
                raise TaskError(unknown(kind, name, allowed))
    if len(batch) < 2 * folds:
        raise TaskError(f"{len(batch)} documents are too few for {folds} folds; draw more")
    labels = {target: _labels(batch, target) for target in targets}
    at = torch.stack([batch.positions[name] for name in positions])
    mask = None if bool(batch.mask.all()) else batch.mask
    probe = _Probe(folds, C, max_iter, seed)
    rows = []
    for site in tqdm(find_sites(model, sites, layers), disable=not progress, desc="sites"):
        found = _activations(model, batch.tokens, site, at, mask)
        for position, activation in zip(positions, found, strict=True):
            for target in targets:
                place = {"site": site.word, "layer": site.layer, "hook": site.hook}
                scores = probe.scores(activation, labels[target])
                rows.append({**place, "position": position, "target": target, **scores})
    return ProbeResults(pd.DataFrame(rows))


def _activations(
    model: HookedModel, tokens: Tensor, site: Site, at: Tensor, mask: Tensor | None
) -> np.ndarray:
    """[place, document, feature], complex numbers as pairs."""
    was_training = model.training
    model.eval()
    try:
        found = activations_at(model, tokens, [site], at, mask)[site]
    finally:
        model.train(was_training)
    if found.is_complex():
        found = torch.view_as_real(found)
    return found.flatten(2).double().cpu().numpy()


def _labels(batch: TaskBatch, target: str) -> np.ndarray:
    name = TARGETS[target]
    if name is None:
        return batch.answer.cpu().numpy()
    return batch.tokens.gather(1, batch.positions[name][:, None])[:, 0].cpu().numpy()


class _Probe:
    """Cross-validated logistic regression, and the same on shuffled labels."""

    def __init__(self, folds: int, C: float, max_iter: int, seed: int):
        # Imported where it is used: it takes a second, which no other analysis needs.
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import KFold
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.estimator = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=max_iter))
        self.folds = KFold(folds, shuffle=True, random_state=seed)
        self.seed = seed

    def scores(self, features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the columns of one row of results. features: [document, feature]"""
        shuffled = np.random.default_rng(self.seed).permutation(labels)
        accuracy, control = self._accuracies(features, labels), self._accuracies(features, shuffled)
        return {
            "accuracy": accuracy.mean(),
            "error": accuracy.std(ddof=1) / len(accuracy) ** 0.5,
            "control": control.mean(),
            "selectivity": accuracy.mean() - control.mean(),
            "majority": np.unique(labels, return_counts=True)[1].max() / len(labels),
            "features": features.shape[1],
            "documents": len(labels),
        }

    def _accuracies(self, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.model_selection import cross_val_score

        if any(len(np.unique(labels[fitted])) < 2 for fitted, _ in self.folds.split(labels)):
            raise TaskError(
                f"in some fold all of the {len(labels)} documents to fit on have one and the same "
                "label: there is nothing to tell apart; draw more documents, or other ones"
            )
        with warnings.catch_warnings():
            # Shuffled labels need not converge: the accuracy counts, not the fit.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return cross_val_score(self.estimator, features, labels, cv=self.folds)
