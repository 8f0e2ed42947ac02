"""Checks that the arguments of an op fit together, and says which one does not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hooked_ssm.errors import ShapeError


def bind_axes(op: str, arguments: Mapping[str, tuple[Tensor | None, str]]) -> dict[str, int]:
    """Bind axis words to sizes, argument by argument, and return the sizes.

    Args:
        op: The op's name, for the message.
        arguments: Per argument name the tensor (None is passed over) and its axis words, such as
            `(x, "batch pos channel")`. The first tensor that has a word fixes its size.
    Raises:
        ShapeError: A tensor is not floating point, on another device than the first one, has
            another number of axes or other sizes, or has no positions.
    """
    sizes: dict[str, int] = {}
    fixed_by: dict[str, str] = {}
    device = None
    for name, (tensor, axes) in arguments.items():
        if tensor is None:
            continue
        words = axes.split()
        if not tensor.is_floating_point():
            raise ShapeError(
                f"{op}: {name} has dtype {tensor.dtype}, wanted a floating point one; cast it"
            )
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ShapeError(
                f"{op}: {name} is on {tensor.device}, the arguments before it on {device}; "
                f"move it with {name}.to({str(device)!r})"
            )
        if tensor.ndim != len(words):
            raise ShapeError(
                f"{op}: {name} has {tensor.ndim} axes {tuple(tensor.shape)}, wanted {len(words)}: "
                f"[{axes}]"
            )
        for word, size in zip(words, tensor.shape, strict=True):
            if sizes.setdefault(word, size) != size:
                raise ShapeError(
                    f"{op}: {name} has shape {tuple(tensor.shape)} for [{axes}], but {word} is "
                    f"{sizes[word]} by {fixed_by[word]}"
                )
            fixed_by.setdefault(word, name)
    if sizes.get("pos") == 0:
        raise ShapeError(f"{op}: {fixed_by['pos']} has no positions; pass at least one token")
    return sizes
