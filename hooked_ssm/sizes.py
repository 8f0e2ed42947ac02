"""How large activations are, known before anything runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hooked_ssm.hook_points import SpecHookPoint

if TYPE_CHECKING:
    from hooked_ssm.model import HookedModel


def activation_shape(
    model: HookedModel, point: SpecHookPoint, batch: int, length: int
) -> tuple[int, ...]:
    """Return the shape that the axes of a hook point promise, for documents of `length` tokens."""
    sizes = {"batch": batch, "pos": length, "query_pos": length, "key_pos": length, "one": 1}
    sizes["d_model"] = model.cfg.d_model
    parts = str(point.name).split(".")
    if parts[0] == "blocks":
        block = model.blocks[int(parts[1])]
        sizes |= block.mixer.axis_sizes()
        sizes["d_mlp"] = int(block.mlp.fc_in.out_features) if block.has_mlp else 0  # type: ignore[arg-type]
        sizes["tap"] = min(sizes.get("tap", 0), length)
    return tuple(sizes[axis] for axis in point.spec.axes)


def activation_bytes(model: HookedModel, point: SpecHookPoint, batch: int, length: int) -> int:
    """Return the bytes of a hook point's activation."""
    numbers = math.prod(activation_shape(model, point, batch, length))
    return numbers * point.spec.bytes_per_number(model.cfg.dtype)
