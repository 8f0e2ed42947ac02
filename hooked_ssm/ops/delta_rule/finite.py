"""The delta rule fails loudly outside its domain."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.errors import DivergedError


def require_finite(op: str, result: Tensor, k: Tensor, beta: Tensor) -> None:
    """Raise if the recurrence blew up.

    Raises:
        DivergedError: `result` holds NaN or infinity; the message says what is out of the domain.
    """
    if result.isfinite().all():
        return
    norm = k.detach().norm(dim=-1).max().item()
    low, high = (x.item() for x in beta.detach().aminmax())
    raise DivergedError(
        f"{op}: the result is not finite. S <- (I - beta k k^T) S stays bounded only for keys of "
        f"at most unit norm and beta in [0, 2]; got a largest key norm of {norm:.4g} and beta in "
        f"[{low:.4g}, {high:.4g}]. Pass k = l2_normalise(k) and beta through a sigmoid; if both "
        "are in range, look for NaN or infinity in the other inputs"
    )
