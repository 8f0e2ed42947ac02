"""What goes into a model: checked tokens, where they stand, and what an earlier call handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import ShapeError
from hooked_ssm.mixers import Carried, Segment
from hooked_ssm.tokens import as_tensor

MaskLike = Tensor | Sequence[Any]
"""Which tokens are real: True (1), and which padding: False (0). [batch, pos]"""


class Past(NamedTuple):
    """What a run hands over to the run on the tokens that follow.

    Attributes:
        length: Tokens so far, padding included.
        offset: Padding so far per document, if any. [batch]
        layers: What each layer's mixer carries on.
        cfg: Of the model that ran; None if unknown.
        fired: The per-position hook points that somebody listened to, and how many hooks each had
            been given by then: one attached later has missed its token.
    """

    length: int
    offset: Tensor | None
    layers: list[Carried]
    cfg: ModelConfig | None = None
    fired: Mapping[str, int] = {}


def check_tokens(ids: Tensor, d_vocab: int, device: torch.device) -> Tensor:
    """Return the ids as int64 if they are integers [batch, pos] of the vocabulary, on the device.

    Raises:
        ShapeError: They are not; says what is.
    """
    kind = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if kind or ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(
            f"tokens: got {ids.dtype} of shape {tuple(ids.shape)}, want integers [batch, pos] "
            "with at least one document and at least one position"
        )
    if ids.device != device:
        raise ShapeError(
            f"tokens are on {ids.device}, the model on {device}; move them: "
            "tokens.to(model.cfg.device)"
        )
    ids = ids.long()
    if ids.device.type == "cpu":  # on a GPU this would wait for the device
        low, high = ids.aminmax()
        if low < 0 or high >= d_vocab:
            raise ShapeError(
                f"token ids run from {int(low)} to {int(high)}, but d_vocab={d_vocab}: allowed "
                f"0..{d_vocab - 1}"
            )
    return ids


def check_residual(resid: Any, weight: Tensor) -> Tensor:
    """Return the residual stream if it is one [batch, pos, d_model].

    Args:
        resid: What was given.
        weight: The model's embedding, whose width, dtype and device it must have (under autocast
            any floating point dtype).

    Raises:
        ShapeError: It does not; says what is.
    """
    d_model = weight.shape[1]
    fits = isinstance(resid, Tensor) and resid.ndim == 3 and resid.shape[2] == d_model
    if not fits or 0 in resid.shape:
        got = tuple(resid.shape) if isinstance(resid, Tensor) else type(resid).__name__
        raise ShapeError(
            f"start_at_layer takes a residual stream [batch, pos, {d_model}], got {got}"
        )
    alike = resid.device == weight.device and (
        resid.dtype == weight.dtype
        or (resid.is_floating_point() and torch.is_autocast_enabled(resid.device.type))
    )
    if not alike:
        raise ShapeError(
            f"start_at_layer: the residual stream is {resid.dtype} on {resid.device}, the model "
            f"{weight.dtype} on {weight.device}; move it: resid.to(model.W_E)"
        )
    return resid


def check_past(past: Any, cfg: ModelConfig, ids: Tensor) -> None:
    """Refuse what another model, or a run on other documents, handed on.

    Raises:
        ShapeError: It does not fit the model or the tokens; says what is.
    """
    if not isinstance(past, Past):
        raise ShapeError(
            f"past is what the last model.step returned second, got a {type(past).__name__}"
        )
    if past.cfg is not None and past.cfg is not cfg:
        for name in ("mixers", "d_model", "n_ctx", "dtype"):
            theirs, ours = getattr(past.cfg, name), getattr(cfg, name)
            if theirs != ours:
                raise ShapeError(
                    f"past comes from a model with {name}={theirs}, this one has {ours}; start "
                    "anew with past=None"
                )
    if len(past.layers) != len(cfg.mixers):
        raise ShapeError(f"past is of {len(past.layers)} layers, the model has {len(cfg.mixers)}")
    for value in (value for carried in past.layers for value in carried.values()):
        if len(value) != len(ids) or value.device != ids.device:
            raise ShapeError(
                f"past is of {len(value)} documents on {value.device}, the tokens of {len(ids)} on "
                f"{ids.device}; they must be the same documents"
            )


def locate(
    shape: torch.Size, device: torch.device, mask: MaskLike | None = None, past: Past | None = None
) -> Segment:
    """Return where tokens stand in their documents, padding not counted.

    Args:
        shape: [batch, pos]
        device: Where the tokens are.
        mask: False at padding; a tensor or lists. [batch, pos], or [pos] for one document
        past: What the call on the tokens before handed on.

    Raises:
        ShapeError: The mask has another shape or device, or other values.
    """
    start, length = 0 if past is None else past.length, shape[1]
    positions = torch.arange(start, start + length, device=device)[None]
    real = None
    if mask is not None:
        real = _as_real(mask, shape, device)
        positions = (real.cumsum(1) - 1).clamp(min=0)
    elif past is not None and past.offset is not None:
        positions = positions - past.offset[:, None]
    return Segment(start, length, positions, real)


def _as_real(mask: MaskLike, shape: torch.Size, device: torch.device) -> Tensor:
    """The mask as bool; only 0 and 1 are taken, lest an additive mask be read backwards."""
    mask = as_tensor("attention_mask", mask, device)
    mask = mask[None] if mask.ndim == 1 and shape[0] == 1 else mask
    if mask.shape != shape:
        raise ShapeError(
            f"attention_mask has shape {tuple(mask.shape)}, tokens {tuple(shape)}; pass one entry "
            "per token"
        )
    if mask.device != device:
        raise ShapeError(f"attention_mask is on {mask.device}, the tokens on {device}; move it")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(
            f"attention_mask is {mask.dtype} with values other than 0 and 1; pass True (1) at "
            "real tokens and False (0) at padding, not an additive mask"
        )
    return mask.bool()


def padding_of(segment: Segment) -> Tensor | None:
    """Return how many tokens of each document are padding; None if none is. [batch]"""
    return None if segment.real is None else (~segment.real).sum(1)
