"""Short causal depthwise convolution whose window is a state."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import StatesWanted
from hooked_ssm.ops.short_conv.cpu import short_conv_cpu
from hooked_ssm.ops.short_conv.output import ConvOutput
from hooked_ssm.ops.short_conv.reference import short_conv_reference

BACKENDS = Backends(
    "short_conv",
    short_conv_reference,
    short_conv_cpu,
    "hooked_ssm.ops.short_conv.triton:short_conv_triton",
)


def short_conv(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    initial_window: Float[Tensor, "batch channel window"] | None = None,
    return_windows: StatesWanted = False,
    impl: Impl = "auto",
) -> ConvOutput:
    """Convolve every channel with its own few taps, causally.

    y[t] = sum over i of weight[i] x[t - (width-1) + i] + bias; the last tap sees the current input.

    Args:
        weight: Any width >= 1.
        initial_window: The width-1 inputs before the first one, oldest first; zeros if None.
            [batch, channel, width-1]
        return_windows: False, True for every position, or the positions wanted.
    Returns:
        windows[:, t] holds the last width-1 inputs after token t, oldest first; its dtype is
        float32, or float64 if x or weight is.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit, or a position lies outside the sequence.
        KernelUnavailableError: impl="triton" where it cannot run.
    """
    sizes = bind_axes(
        "short_conv",
        {
            "x": (x, "batch pos channel"),
            "weight": (weight, "channel width"),
            "bias": (bias, "channel"),
            "initial_window": (initial_window, "batch channel window"),
        },
    )
    if sizes["width"] == 0:
        raise ShapeError("short_conv: weight has no taps; leave the convolution out instead")
    if initial_window is not None and sizes["window"] != sizes["width"] - 1:
        raise ShapeError(
            f"short_conv: initial_window has {sizes['window']} columns, wanted width-1 = "
            f"{sizes['width'] - 1}; caches of other libraries hold one more: drop their oldest "
            "column, cache[..., 1:]"
        )
    run = BACKENDS.pick(impl, x.device)
    return run(x, weight, bias, initial_window, return_windows)


__all__ = ["BACKENDS", "ConvOutput", "short_conv"]
