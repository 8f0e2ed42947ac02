"""Causal convolution with a filter as long as the sequence."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.causal import is_spoilt
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.long_conv.cpu import long_conv_cpu, toeplitz_rows
from hooked_ssm.ops.long_conv.reference import long_conv_reference

BACKENDS = Backends("long_conv", long_conv_reference, long_conv_cpu)


def long_conv(
    u: Float[Tensor, "batch pos channel"],
    filter: Float[Tensor, "channel tap"],
    *,
    skip: Float[Tensor, " channel"] | None = None,
    history: Float[Tensor, "batch earlier channel"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "batch pos channel"]:
    """Convolve every channel with its own filter, causally.

    y[t] = sum over s <= t of filter[t-s] u[s] + skip u[t]

    Computed in float32 (float64 if u or filter is) and returned in the dtype of u. The FFT's
    rounding lets about 1e-7 of the largest input reach every output, earlier ones too; up to
    8 positions are summed directly, without that.

    Args:
        filter: filter[:, 0] acts on the current input. Taps beyond the sequence (with its
            history) are cut off; a filter shorter than that is zero beyond its end.
        skip: Weight of the input added to the output; nothing is added if None.
        history: Inputs before u[:, 0], oldest first. They act on y, but y covers u's positions
            only: a sequence cut anywhere gives the same outputs.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit.
        KernelUnavailableError: impl="triton".
    """
    sizes = bind_axes(
        "long_conv",
        {
            "u": (u, "batch pos channel"),
            "filter": (filter, "channel tap"),
            "skip": (skip, "channel"),
            "history": (history, "batch earlier channel"),
        },
    )
    if sizes["tap"] == 0:
        raise ShapeError("long_conv: filter has no taps, wanted [channel tap] with tap >= 1")
    run = BACKENDS.pick(impl, u.device)
    y = run(u, filter, skip, history)
    if not is_spoilt(y, 1):
        return y
    bad = [~part.isfinite() for part in (history, u) if part is not None]
    clean = None if history is None else history.masked_fill(bad[0], 0)
    y = run(u.masked_fill(bad[-1], 0), filter, skip, clean)
    met = torch.cat(bad, dim=1).cumsum(1)[:, -u.shape[1] :] > 0
    return y.masked_fill(met, torch.nan)


def toeplitz(
    filter: Float[Tensor, "channel tap"], length: int
) -> Float[Tensor, "channel query_pos key_pos"]:
    """Return the token-mixing matrix of the convolution: pattern[q, k] = filter[q-k], 0 for k > q.

    `einsum("cqk,bkc->bqc", toeplitz(filter, length), u)` is long_conv without its skip, and
    `toeplitz(weight.flip(-1), length)` is the matrix of a short convolution. A skip adds to the
    diagonal.

    Raises:
        ShapeError: Not [channel, tap], or length < 1.
    """
    bind_axes("toeplitz", {"filter": (filter, "channel tap")})
    if length < 1:
        raise ShapeError(f"toeplitz: length is {length}, wanted at least 1")
    return toeplitz_rows(filter, length, length)


__all__ = ["BACKENDS", "long_conv", "toeplitz"]
