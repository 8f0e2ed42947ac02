"""In-context learning: how the loss falls with position, as one number and as a curve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.analysis.documents import mean_and_error
from hooked_ssm.checks import AttentionMask, checked
from hooked_ssm.errors import ShapeError
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel


@dataclass(frozen=True)
class LossCurve:
    """Result of `loss_per_position`.

    Attributes:
        losses: Cross-entropy of each next token, NaN beside padding. [batch, pos - 1]
        frame: One row per position: position (of the token that is predicted from), loss and error
            (mean over documents and its standard error).
    """

    losses: Float[Tensor, "batch predicted"] = field(repr=False)
    frame: pd.DataFrame = field(repr=False)

    def plot(self, name: str = "model") -> Any:
        """Return a plotly figure of the loss at each position."""
        from hooked_ssm.plots.scores import loss_by_position

        return loss_by_position({name: self.frame})

    def _repr_html_(self) -> str:
        return titled_table("Loss per position", self.frame)


@checked
@torch.no_grad()
def loss_per_position(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    *,
    attention_mask: AttentionMask | None = None,
) -> LossCurve:
    """Return the next-token loss at every position, its mean over documents and standard error.

    Args:
        attention_mask: False at padding; those positions count for no document. [batch, pos]
    """
    losses = model(tokens, "loss", attention_mask=attention_mask, loss_per_token=True).double()
    if attention_mask is not None:
        real = attention_mask.bool()
        losses = losses.masked_fill(~(real[:, 1:] & real[:, :-1]), torch.nan)
    means = [mean_and_error(column) for column in losses.unbind(1)]
    frame = pd.DataFrame(means, columns=["loss", "error"])
    frame.insert(0, "position", range(len(frame)))
    return LossCurve(losses, frame)


@checked
def in_context_learning_score(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    *,
    early: int | slice = 50,
    late: int | slice = 500,
    attention_mask: AttentionMask | None = None,
) -> tuple[float, float]:
    """Return mean loss at `late` positions minus mean loss at `early` ones, and its standard error.

    Negative: later tokens are predicted better. The defaults are Olsson et al.'s; for repeated
    sequences of period P behind <bos> take early=slice(1, P) and late=slice(P + 1, 2 * P).

    Raises:
        ShapeError: A position lies outside.
    """
    losses = loss_per_position(model, tokens, attention_mask=attention_mask).losses
    late_loss, early_loss = (_mean_at(losses, where) for where in (late, early))
    return mean_and_error(late_loss - early_loss)


def _mean_at(losses: Tensor, where: int | slice) -> Tensor:
    span = where if isinstance(where, slice) else slice(where, where + 1)
    try:
        chosen = losses[:, span]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{where} is no slice of positions: {error}") from error
    if chosen.shape[1] == 0 or (isinstance(where, int) and where < 0):
        raise ShapeError(
            f"{where} selects no position: a loss is defined at positions 0..{losses.shape[1] - 1}"
        )
    return chosen.nanmean(1)
