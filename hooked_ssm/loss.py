"""The next-token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.errors import ShapeError


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    real: Tensor | None = None,
    per_token: bool = False,
) -> Tensor:
    """Cross-entropy of each next token; its mean over pairs of real tokens, or each of them.

    Raises:
        ShapeError: Fewer than two real tokens side by side, or tokens of another shape.
    """
    if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
        raise ShapeError(
            f"a next-token loss needs logits [batch, pos, d_vocab] and tokens [batch, pos], got "
            f"{list(logits.shape)} and {list(tokens.shape)}"
        )
    if logits.shape[1] < 2:
        raise ShapeError("a next-token loss needs at least two tokens, got one")
    core = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = F.log_softmax(logits[:, :-1].to(core), dim=-1)
    losses = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    if real is None:
        return losses if per_token else losses.mean()
    counts = real[:, 1:] & real[:, :-1]
    losses = losses.masked_fill(~counts, 0)
    if not per_token and not bool(counts.any()):
        raise ShapeError("a next-token loss needs two real tokens side by side; the mask has none")
    return losses if per_token else losses.sum() / counts.sum()
