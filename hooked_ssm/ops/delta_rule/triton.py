"""The delta rule by the Triton kernels of `ops/matrix_state_kernels.py`.

Every function has its twin in reference.py, with the same arguments.
"""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.matrix_state_triton import matrix_state_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """Outputs, states and final state; see reference.delta_rule."""
    return matrix_state_scan(
        q * scale,
        k,
        v,
        beta=beta,
        log_decay=log_decay,
        initial_state=initial_state,
        return_states=return_states,
    )


def prediction_error(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor
) -> Tensor:
    """What the memory got wrong at each token; see reference.prediction_error."""
    return matrix_state_scan(
        None, k, v, beta=beta, log_decay=log_decay, initial_state=initial_state
    ).y


def delta_rule_given_error(
    q: Tensor,
    k: Tensor,
    error: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """Linear attention with the values beta error; see reference.delta_rule_given_error."""
    return matrix_state_scan(
        q * scale,
        k,
        beta * error,
        log_decay=log_decay,
        initial_state=initial_state,
        return_states=return_states,
    )


def delta_rule_from_writes(
    k: Tensor, beta: Tensor, log_decay: Tensor | None, write: Tensor, initial_state: Tensor
) -> Tensor:
    """Every state, given what is added; see reference.delta_rule_from_writes."""
    states = matrix_state_scan(
        None,
        k,
        None,
        beta=beta,
        log_decay=log_decay,
        write=write,
        initial_state=initial_state,
        return_states=True,
    ).states
    assert states is not None, "all of them were asked for"
    return states
