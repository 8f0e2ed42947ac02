"""H3's complex diagonal state space model, its filters, and the shift SSM's filter.

    x[t] = dA x[t-1] + dB u[t];   y[t] = 2 Re sum_n C[n] x[t, n]

`diagonal_ssm` runs the recurrence, state included. Who needs outputs only convolves with
`diagonal_kernel`, which is cheaper when there are many modes.
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.diagonal_ssm.cpu import diagonal_ssm_cpu
from hooked_ssm.ops.diagonal_ssm.kernels import (
    Modes,
    diagonal_kernel,
    discretise_bilinear,
    shift_kernel,
)
from hooked_ssm.ops.diagonal_ssm.reference import diagonal_ssm_reference
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype

BACKENDS = Backends(
    "diagonal_ssm",
    diagonal_ssm_reference,
    diagonal_ssm_cpu,
    "hooked_ssm.ops.diagonal_ssm.triton:diagonal_ssm_triton",
)


def diagonal_ssm(
    u: Float[Tensor, "batch pos channel *inner"],
    dA: Modes,
    dB: Modes,
    C: Modes,
    *,
    initial_state: Complex[Tensor, "batch channel *inner mode"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run the diagonal SSM and return outputs, states and the final state.

    x[t] = dA x[t-1] + dB u[t];   y[t] = 2 Re sum_n C[n] x[t, n]

    Args:
        u: Inputs; the inner axes of a channel share its parameters (H3's head takes the outer
            product of key and value). [batch, pos, channel, *inner]
        dA, dB, C: Discrete parameters, complex; |dA| <= 1. [channel, mode]
        initial_state: x[-1], complex; zeros if None. [batch, channel, *inner, mode]
        return_states: False, True for every position, or the positions wanted.
    Returns:
        y in the dtype of u. states[:, i] is x *after* the token, complex64 (complex128 if any
        input is of double precision). [batch, wanted, channel, *inner, mode]
    Raises:
        ShapeError: Shapes that do not fit.
        KernelUnavailableError: impl="triton" where it cannot run.
    Source: Fu et al. 2023, "Hungry Hungry Hippos"; Gu et al. 2022, S4D.
    """
    if u.ndim < 3:
        raise ShapeError(
            f"diagonal_ssm: u has shape {tuple(u.shape)}, wanted [batch pos channel *inner]"
        )
    inner = " ".join(f"inner{i}" for i in range(u.ndim - 3))
    modes = "channel mode"
    parts = {"dA": (dA, modes), "dB": (dB, modes), "C": (C, modes)}
    if initial_state is not None:
        parts["initial_state"] = (initial_state, f"batch channel {inner} mode")
    # complex tensors have the shape and the precision of their real parts
    parts = {name: (x.real, axes) for name, (x, axes) in parts.items()}
    sizes = bind_axes("diagonal_ssm", {"u": (u, f"batch pos channel {inner}"), **parts})
    core = core_dtype(u, *(x for x, _ in parts.values()))
    complex_core = torch.complex128 if core == torch.float64 else torch.complex64
    dA, dB, C = (x.to(complex_core) for x in (dA, dB, C))
    if initial_state is None:
        shape = (u.shape[0], *u.shape[2:], sizes["mode"])
        state = torch.zeros(shape, dtype=complex_core, device=u.device)
    else:
        state = initial_state.to(complex_core)
    run = BACKENDS.pick(impl, u.device)
    out = run(u.to(core), dA, dB, C, state, return_states)
    return out._replace(y=out.y.to(u.dtype))


__all__ = ["BACKENDS", "diagonal_kernel", "diagonal_ssm", "discretise_bilinear", "shift_kernel"]
