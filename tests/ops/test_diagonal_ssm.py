"""The diagonal SSM and H3's filters: hand-worked, the reference, segments, fixtures, a layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.diagonal_ssm import (
    diagonal_kernel,
    diagonal_ssm,
    discretise_bilinear,
    shift_kernel,
)
from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.long_conv import long_conv
from tests.ops.checks import (
    LENGTHS,
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    randn,
)
from tests.parity import Fixture, fixture_names

IMPLS = ["reference", "cpu"]


def as_complex(x: torch.Tensor | None) -> torch.Tensor | None:
    """Pairs on the last axis to complex numbers."""
    return None if x is None else torch.view_as_complex(x.contiguous())


def in_reals(u, dA, dB, C, initial_state=None, **options):
    """`diagonal_ssm` with complex numbers as pairs, as the shared checks want them."""
    out = diagonal_ssm(
        u,
        as_complex(dA),
        as_complex(dB),
        as_complex(C),
        initial_state=as_complex(initial_state),
        **options,
    )
    states = None if out.states is None else torch.view_as_real(out.states)
    return out._replace(states=states, final_state=torch.view_as_real(out.final_state))


def make(batch: int, length: int, channels: int, modes: int, *inner: int) -> dict:
    """Real tensors, complex numbers as pairs; |dA| between 0.3 and 0.98."""
    turn = randn(channels, modes, 2, seed=1)
    size = 0.3 + 0.68 * randn(channels, modes, 1, seed=2).sigmoid()
    return {
        "u": randn(batch, length, channels, *inner, seed=0),
        "dA": size * turn / turn.norm(dim=-1, keepdim=True),
        "dB": randn(channels, modes, 2, seed=3),
        "C": randn(channels, modes, 2, seed=4),
        "initial_state": randn(batch, channels, *inner, modes, 2, seed=5),
    }


def without_initial(inputs: dict) -> dict:
    return {name: x for name, x in inputs.items() if name != "initial_state"}


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    u = torch.tensor([1.0, 0, 2])[None, :, None]
    dA, dB, C = (torch.tensor([[z]]) for z in (0.5j, 2 + 0j, 1 - 1j))
    out = diagonal_ssm(u, dA, dB, C, return_states=True, impl=impl)
    assert out.states.flatten().tolist() == [2, 1j, 3.5]
    assert out.y.flatten().tolist() == [4, 2, 7]
    assert out.final_state.flatten().tolist() == [3.5]
    assert diagonal_kernel(dA, dB, C, 4).tolist() == [[4, 2, -1, -0.5]]


def test_discretise_by_hand():
    A, B = torch.tensor([[-2 + 0j, -1 + 2j]]), torch.tensor([[3 + 0j, 1j]])
    dA, dB = discretise_bilinear(A, B, torch.tensor([1.0]))
    torch.testing.assert_close(dA, torch.tensor([[0, (0.5 + 1j) / (1.5 - 1j)]]))
    torch.testing.assert_close(dB, torch.tensor([[1.5, 1j / (1.5 - 1j)]]))


@pytest.mark.parametrize("modes", [2, 40])
@pytest.mark.parametrize("wanted", [False, True, [0], [99], [64, 3, -1, 3], range(40)], ids=str)
def test_only_some_states(wanted, modes):
    check_against_reference(in_reals, make(2, 100, 2, modes, 2), return_states=wanted)


def test_states_are_prefix_finals():
    inputs = make(2, 70, 2, 3, 2)
    check_states_are_prefix_finals(in_reals, inputs, [0, 1, 34, 35, 69], along_pos=["u"])


def test_causal():
    check_causal(in_reals, make(2, 80, 2, 3), along_pos=["u"])


@pytest.mark.parametrize("decay", [0.0, 1e-30])
def test_vanishing_decay(decay):
    inputs = make(2, 100, 2, 3)
    check_against_reference(in_reals, {**inputs, "dA": decay * inputs["dA"]}, return_states=True)
    floats = {name: x.float() for name, x in inputs.items()}
    out = in_reals(**{**floats, "dA": decay * floats["dA"]})
    assert out.y.isfinite().all()


@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_is_the_impulse_response(length):
    inputs = make(1, length, 3, 4)
    impulse = F.one_hot(torch.zeros(1, dtype=torch.long), length).double()[..., None]

    def filter(dA, dB, C, impl):
        dA, dB, C = map(as_complex, (dA, dB, C))
        if impl == "reference":
            return diagonal_ssm(impulse.expand(1, -1, 3), dA, dB, C, impl=impl).y[0].T
        return diagonal_kernel(dA, dB, C, length)

    parameters = {name: inputs[name] for name in ("dA", "dB", "C")}
    check_against_reference(filter, parameters)
    check_against_reference(filter, parameters, dtype=torch.float32)


@pytest.mark.parametrize(("slots", "length"), [(1, 1), (1, 3), (4, 2), (4, 4), (5, 12)])
def test_shift_kernel_is_stepping(slots, length):
    B, C = randn(2, slots, seed=1), randn(2, slots, seed=2)
    state, taps = torch.zeros(2, slots, dtype=torch.float64), []
    for t in range(length):
        state = F.pad(state, (1, 0))[:, :-1] + B * (t == 0)
        taps.append((C * state).sum(-1))
    got = shift_kernel(B, C, length)
    assert_near("filter", got, torch.stack(taps, dim=-1), 1e-12)
    assert got[:, slots:].count_nonzero() == 0


def test_shift_kernel_gradients():
    assert torch.autograd.gradcheck(
        lambda B, C: shift_kernel(B, C, 5),
        (randn(2, 4, seed=1).requires_grad_(), randn(2, 4, seed=2).requires_grad_()),
    )


def test_dtypes():
    inputs = make(2, 20, 2, 3)
    modes = [as_complex(inputs[name]) for name in ("dA", "dB", "C")]
    out = diagonal_ssm(inputs["u"].bfloat16(), *(x.to(torch.complex64) for x in modes))
    assert (out.y.dtype, out.final_state.dtype) == (torch.bfloat16, torch.complex64)
    out = diagonal_ssm(inputs["u"].float(), *modes)
    assert (out.y.dtype, out.final_state.dtype) == (torch.float32, torch.complex128)


def test_errors_name_the_argument(as_shipped):
    u, modes = torch.zeros(2, 5, 3, 2), torch.zeros(3, 4, dtype=torch.complex64)
    with pytest.raises(ShapeError, match=r"u has shape \(2, 5\)"):
        diagonal_ssm(u[:, :, 0, 0], modes, modes, modes)
    with pytest.raises(ShapeError, match="dB has shape .* channel is 3"):
        diagonal_ssm(u, modes, modes[:2], modes)
    with pytest.raises(ShapeError, match="initial_state has 3 axes"):
        diagonal_ssm(u, modes, modes, modes, initial_state=modes[None])
    with pytest.raises(ShapeError, match="no positions"):
        diagonal_ssm(u[:, :0], modes, modes, modes)
    with pytest.raises(ShapeError, match="position 5"):
        diagonal_ssm(u, modes, modes, modes, return_states=[5])
    with pytest.raises(ShapeError, match="length is 0"):
        diagonal_kernel(modes, modes, modes, 0)
    with pytest.raises(ShapeError, match="slot is 4"):
        shift_kernel(modes.real, modes.real[:, :2], 3)
    diagonal_ssm(u, modes, modes, modes)
    assert last_impl() == ("diagonal_ssm", "cpu")


def discrete(weights: dict, prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """H3's parameters to dA, dB, C."""
    named = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
    A = torch.complex(-named["inv_A_real"].exp(), named["A_imag"])
    dA, dB = discretise_bilinear(A, as_complex(named["B"]), named["log_dt"].exp())
    return dA, dB, as_complex(named["C"][0])


def shift_states(u: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Every slot by its own filter: what it is if only that slot is read. [batch, pos, c, slot]"""
    slots = B.shape[1]
    filters = [
        shift_kernel(B, torch.eye(slots, dtype=B.dtype)[n].expand_as(B), u.shape[1])
        for n in range(slots)
    ]
    return torch.stack([long_conv(u, filter) for filter in filters], dim=-1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_h3_kernels"))
def test_kernels_fixture(name, impl):
    fixture = Fixture(name)
    length = fixture.config["kernel_length"]
    for dtype, kind in ((torch.float64, "out64"), (torch.float32, "out")):
        inputs, weights = fixture.group("in.", dtype), fixture.group("state.", dtype)
        B, C = weights["shift.B"], weights["shift.C"][0]
        shift = shift_kernel(B, C, length)
        fixture.check(f"{kind}.shift_kernel", shift)
        fixture.check(f"{kind}.shift_conv", long_conv(inputs["u_shift"], shift, impl=impl))
        dA, dB, C = discrete(weights, "diag.")
        diagonal = diagonal_kernel(dA, dB, C, length)
        fixture.check(f"{kind}.diag_kernel", diagonal)
        fixture.check(f"{kind}.diag_conv", long_conv(inputs["u_diag"], diagonal, impl=impl))
        out = diagonal_ssm(inputs["u_diag"], dA, dB, C, return_states=True, impl=impl)
        fixture.check(f"{kind}.diag_conv", out.y)
        if dtype == torch.float64:
            fixture.check("mid64.dA", torch.view_as_real(dA))
            fixture.check("mid64.dB", torch.view_as_real(dB))
            fixture.check("mid64.diag_states", torch.view_as_real(out.states))
            fixture.check("mid64.shift_states", shift_states(inputs["u_shift"], B))


@pytest.mark.parametrize("route", ["filter", "recurrence"])
@pytest.mark.parametrize("name", fixture_names("layer_h3"))
def test_layer_fixture(name, route):
    """The functions suffice for H3: a whole layer from them, by convolution and by recurrence."""
    fixture = Fixture(name)
    config, weights = fixture.config, fixture.group("state.", torch.float64)
    x = fixture.group("in.", torch.float64)["x"]
    batch, length, d_model = x.shape
    taps = min(length, config["l_max"])
    if route == "recurrence" and taps < length:
        route = "filter"  # filters cut to l_max have finite memory: no recurrence equals that

    def linear(part: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{part}.weight"], weights[f"{part}.bias"])

    q, k, v = (linear(f"{part}_proj", x) for part in "qkv")
    shift = shift_kernel(
        weights["ssm_k_kernel.kernel.B"], weights["ssm_k_kernel.kernel.C"][0], taps
    )
    shifted = long_conv(k, shift, skip=weights["ssm_k_D"])
    fixture.check("mid.shift_out", shifted.float())
    heads = (batch, length, config["n_heads"], config["head_dim"])
    kv = shifted.view(heads)[..., :, None] * v.view(heads)[..., None, :]
    dA, dB, C = discrete(weights, "kernel.kernel.")
    if route == "recurrence":
        y = diagonal_ssm(kv, dA, dB, C).y
    else:
        filter = diagonal_kernel(dA, dB, C, taps).repeat_interleave(config["head_dim"] ** 2, 0)
        y = long_conv(kv.flatten(2), filter).view_as(kv)
    y = y + weights["D"][:, None, None] * kv
    mixed = (q.view(heads)[..., :, None] * y).sum(-2).transpose(-1, -2).reshape(x.shape)
    fixture.check("mid.pre_out", mixed.float())
    fixture.check("out64.y", linear("output_linear", mixed))
