"""What goes into a model: checked tokens, where they stand, and what an earlier call handed on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.mixers import Carried, Segment


class Past(NamedTuple):
    """What a run hands over to the run on the tokens that follow.

    Attributes:
        length: Tokens so far, padding included.
        offset: Padding so far per document, if any. [batch]
        layers: What each layer's mixer carries on.
    """

    length: int
    offset: Tensor | None
    layers: list[Carried]


def check_tokens(ids: Tensor, d_vocab: int, device: torch.device) -> Tensor:
    """Return the ids if they are integers [batch, pos] of the vocabulary, on the device.

    Raises:
        ShapeError: They are not; says what is.
    """
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim != 2 or ids.shape[1] == 0:
        raise ShapeError(
            f"tokens: got {ids.dtype} of shape {tuple(ids.shape)}, want integers [batch, pos] "
            "with at least one position"
        )
    if ids.device != device:
        raise ShapeError(
            f"tokens are on {ids.device}, the model on {device}; move them: "
            "tokens.to(model.cfg.device)"
        )
    if ids.device.type == "cpu" and ids.numel():  # on a GPU this would wait for the device
        low, high = ids.aminmax()
        if low < 0 or high >= d_vocab:
            raise ShapeError(
                f"token ids run from {int(low)} to {int(high)}, but d_vocab={d_vocab}: allowed "
                f"0..{d_vocab - 1}"
            )
    return ids


def check_residual(resid: Any, d_model: int) -> Tensor:
    """Return the residual stream if it is one [batch, pos, d_model].

    Raises:
        ShapeError: It is not; says what is.
    """
    if not isinstance(resid, Tensor) or resid.ndim != 3 or resid.shape[2] != d_model:
        got = tuple(resid.shape) if isinstance(resid, Tensor) else type(resid).__name__
        raise ShapeError(
            f"start_at_layer takes a residual stream [batch, pos, {d_model}], got {got}"
        )
    return resid


def locate(
    shape: torch.Size, device: torch.device, mask: Tensor | None, past: Past | None
) -> Segment:
    """Return where tokens stand in their documents, padding not counted.

    Args:
        shape: [batch, pos]
        mask: False at padding. [batch, pos]
        past: What the call on the tokens before handed on.

    Raises:
        ShapeError: The mask has another shape.
    """
    start, length = 0 if past is None else past.length, shape[1]
    positions = torch.arange(start, start + length, device=device)[None]
    real = None
    if mask is not None:
        if tuple(mask.shape) != tuple(shape):
            raise ShapeError(f"attention_mask has shape {tuple(mask.shape)}, tokens {tuple(shape)}")
        real = _as_real(mask)
        positions = (real.cumsum(1) - 1).clamp(min=0)
    elif past is not None and past.offset is not None:
        positions = positions - past.offset[:, None]
    return Segment(start, length, positions, real)


def _as_real(mask: Tensor) -> Tensor:
    """The mask as bool; only 0 and 1 are taken, lest an additive mask be read backwards."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(
            f"attention_mask is {mask.dtype} with values other than 0 and 1; pass True (1) at "
            "real tokens and False (0) at padding, not an additive mask"
        )
    return mask.bool()


def padding_of(segment: Segment) -> Tensor | None:
    """Return how many tokens of each document are padding; None if none is. [batch]"""
    return None if segment.real is None else (~segment.real).sum(1)
