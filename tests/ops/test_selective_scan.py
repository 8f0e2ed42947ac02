"""Mamba-1's selective scan: the specification, the compiled kernel, states, gradients, fixtures."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import KernelUnavailableError, ShapeError
from hooked_ssm.ops.dispatch import last_impl, use_impl
from hooked_ssm.ops.selective_scan import cpu, selective_scan, selective_scan_pattern
from tests.ops.checks import (
    LENGTHS,
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    outputs_and_grads,
    randn,
)
from tests.parity import Fixture, fixture_names

IMPLS = ["reference", "cpu"]
ALONG_POS = ["x", "dt", "B", "C"]
KERNEL = pytest.mark.skipif(cpu.load_kernel() is None, reason="installed without a C compiler")


def make(batch: int, length: int, d_inner: int, d_state: int, groups: int | None = None) -> dict:
    shared = (batch, length, d_state) if groups is None else (batch, length, groups, d_state)
    return {
        "x": randn(batch, length, d_inner, seed=0),
        "dt": F.softplus(randn(batch, length, d_inner, seed=1) - 1),
        "A": -randn(d_inner, d_state, seed=2).exp(),
        "B": randn(*shared, seed=3),
        "C": randn(*shared, seed=4),
        "initial_state": randn(batch, d_inner, d_state, seed=5),
    }


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    """Two states with decays 1/2 and 1/4 per unit of dt, three tokens."""
    halves = -torch.tensor([[1.0, 2.0]]) * math.log(2)
    x = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    dt = torch.tensor([1.0, 2.0, 1.0]).view(1, 3, 1)
    B = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])[None]
    C = torch.tensor([[1.0, 0.0], [1.0, 16.0], [2.0, 1.0]])[None]
    out = selective_scan(x, dt, halves, B, C, return_states=True, impl=impl)
    # (1, 1);  (1/4 + 4, 1/16 + 0);  (4.25 / 2 + 0, 1/64 + 4)
    want = torch.tensor([[1.0, 1.0], [4.25, 0.0625], [2.125, 4.015625]])
    torch.testing.assert_close(out.states[0, :, 0], want)
    torch.testing.assert_close(out.y[0, :, 0], torch.tensor([1.0, 5.25, 8.265625]))
    torch.testing.assert_close(out.final_state[0, 0], want[-1])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("batch", "d_inner", "d_state", "groups"),
    [(1, 4, 1, None), (3, 6, 5, 3), (1, 6, 16, 2), (3, 70, 16, 1)],
)
def test_kernel_against_the_reference(length, batch, d_inner, d_state, groups):
    """70 channels: more than one block of the kernel; 257 tokens: more than eight chunks."""
    inputs = make(batch, length, d_inner, d_state, groups)
    if d_inner == 70 and length > 100:
        inputs = {n: v[:1] if v.ndim > 2 else v for n, v in inputs.items()}
    dtype = torch.float32
    for states in (False, True, [0], [length - 1, 0, length - 1, length // 2]):
        check_against_reference(selective_scan, inputs, dtype=dtype, return_states=states)
        assert last_impl() == ("selective_scan", "cpu" if cpu.load_kernel() else "reference")


def test_without_an_initial_state_it_is_zero():
    inputs = make(2, 40, 5, 3)
    zero = {**inputs, "initial_state": torch.zeros_like(inputs["initial_state"])}
    del inputs["initial_state"]
    check_against_reference(selective_scan, inputs, dtype=torch.float32)
    for impl in IMPLS:
        cast = {n: v.float() for n, v in inputs.items()}
        want = selective_scan(**{n: v.float() for n, v in zero.items()}, impl=impl)
        assert torch.equal(selective_scan(**cast, impl=impl).y, want.y)


@pytest.mark.parametrize("impl", IMPLS)
def test_states_are_prefix_finals(impl):
    inputs = {n: v.float() for n, v in make(2, 40, 4, 3).items()}
    check_states_are_prefix_finals(
        selective_scan, inputs, (0, 1, 31, 32, 39), along_pos=ALONG_POS, relative=1e-6, impl=impl
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_causal(impl):
    inputs = {n: v.float() for n, v in make(1, 37, 3, 2).items()}
    check_causal(selective_scan, inputs, along_pos=ALONG_POS, impl=impl)


def test_states_come_in_the_order_asked_for():
    inputs = {n: v.float() for n, v in make(2, 50, 3, 4).items()}
    every = selective_scan(**inputs, return_states=True).states
    wanted = [7, 49, 7, -1, 0]
    some = selective_scan(**inputs, return_states=wanted).states
    assert torch.equal(some, every[:, wanted])
    assert selective_scan(**inputs).states is None
    assert selective_scan(**inputs, return_states=[]).states.shape == (2, 0, 3, 4)
    with pytest.raises(ShapeError, match="position 50, but the sequence has positions 0..49"):
        selective_scan(**inputs, return_states=[50])


def test_non_contiguous_inputs_give_the_same():
    inputs = {n: v.float() for n, v in make(2, 35, 6, 5, 2).items()}
    want, want_grads = outputs_and_grads(selective_scan, inputs, return_states=True)
    strided = {n: v.transpose(0, -1).contiguous().transpose(0, -1) for n, v in inputs.items()}
    assert not any(v.is_contiguous() for v in strided.values())
    for name, value in outputs_and_grads(selective_scan, strided, return_states=True)[1].items():
        assert torch.equal(value, want_grads[name]), name
    expanded = {**inputs, "x": inputs["x"][:, :1].expand(-1, 35, -1)}
    copied = {**inputs, "x": expanded["x"].contiguous()}
    assert torch.equal(selective_scan(**expanded).y, selective_scan(**copied).y)
    assert torch.equal(selective_scan(**inputs, return_states=True).states, want["states"])


@pytest.mark.parametrize("impl", IMPLS)
def test_huge_decays_forget_and_stay_finite(impl):
    inputs = make(2, 40, 4, 3)
    inputs["A"] = inputs["A"].clone()
    inputs["A"][1] = -1e6
    inputs["dt"] = inputs["dt"].clone()
    inputs["dt"][:, 20] = 50.0
    dtype = torch.float64 if impl == "reference" else torch.float32
    outputs, grads = outputs_and_grads(
        selective_scan, {n: v.to(dtype) for n, v in inputs.items()}, impl=impl, return_states=True
    )
    assert all(v.isfinite().all() for v in [*outputs.values(), *grads.values()])
    fresh = selective_scan(
        **{n: (v[:, 20:] if n in ALONG_POS else v).to(dtype) for n, v in inputs.items()}, impl=impl
    )
    assert_near("y after forgetting", outputs["y"][:, 20:, 1], fresh.y[..., 1], 1e-6)
    check_against_reference(selective_scan, inputs, dtype=torch.float32, relative=5e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_step_keeps_the_state(impl):
    """dt = 0, as at padding: nothing decays, nothing is written."""
    inputs = {n: v.float() for n, v in make(2, 12, 4, 3).items()}
    inputs["dt"] = torch.zeros_like(inputs["dt"])
    final = selective_scan(**inputs, impl=impl).final_state
    assert torch.equal(final, inputs["initial_state"])


def test_low_precision_keeps_a_float32_state():
    inputs = make(2, 64, 6, 4)
    narrow = {n: v.bfloat16() if n in ("x", "B", "C") else v.float() for n, v in inputs.items()}
    out = selective_scan(**narrow, return_states=True)
    assert out.y.dtype == torch.bfloat16
    assert out.states.dtype == out.final_state.dtype == torch.float32
    wide = selective_scan(**{n: v.double() for n, v in narrow.items()}, return_states=True)
    assert_near("states", out.states, wide.states, 2e-6)
    assert_near("y", out.y, wide.y, 2**-8)


@KERNEL
def test_threads_share_the_work_and_change_nothing(monkeypatch):
    inputs = {n: v.float() for n, v in make(3, 40, 70, 5).items()}
    want, want_grads = outputs_and_grads(selective_scan, inputs, return_states=[3, 39])
    monkeypatch.setattr(cpu, "_SMALL", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        got, grads = outputs_and_grads(selective_scan, inputs, return_states=[3, 39])
    finally:
        torch.set_num_threads(before)
    for name in want:
        assert torch.equal(got[name], want[name]), name
    for name in want_grads:
        assert torch.equal(grads[name], want_grads[name]), name


def test_without_a_compiled_kernel_the_loop_runs(monkeypatch):
    inputs = {n: v.float() for n, v in make(2, 20, 4, 3).items()}
    want = selective_scan(**inputs, return_states=[5], impl="reference")
    monkeypatch.setattr(cpu, "load_kernel", lambda: None)
    got = selective_scan(**inputs, return_states=[5])
    assert last_impl() == ("selective_scan", "reference")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_which_implementation_ran_is_known():
    inputs = {n: v.float() for n, v in make(1, 5, 3, 2).items()}
    with use_impl("reference"):
        selective_scan(**inputs)
    assert last_impl() == ("selective_scan", "reference")
    selective_scan(**{n: v.double() for n, v in inputs.items()})
    assert last_impl() == ("selective_scan", "reference"), "float64 takes the loop"


def test_bad_shapes_are_refused_by_name(as_shipped):
    inputs = {n: v.float() for n, v in make(2, 9, 6, 4).items()}
    for name, bad, message in (
        ("x", inputs["x"][0], r"x has shape \(9, 6\), want \[batch, pos >= 1, d_inner\]"),
        ("dt", inputs["dt"][:, :3], r"dt has shape \(2, 3, 6\), want \(2, 9, 6\)"),
        ("A", inputs["A"][:2], r"A has shape \(2, 4\), want \(6, 4\)"),
        ("C", inputs["C"][..., :2], r"C has shape \(2, 9, 1, 2\), want \(2, 9, 1, 4\)"),
        ("initial_state", inputs["initial_state"][:1], "initial_state has shape"),
        ("B", inputs["B"][:, :, None].expand(-1, -1, 4, -1), "4 groups do not divide 6 channels"),
    ):
        with pytest.raises(ShapeError, match=message):
            selective_scan(**{**inputs, name: bad})


def test_triton_on_a_cpu_tensor_says_what_is_missing():
    inputs = {n: v.float() for n, v in make(1, 3, 2, 2).items()}
    if cpu_can_interpret():
        assert torch.isfinite(selective_scan(**inputs, impl="triton").y).all()
    else:
        with pytest.raises(KernelUnavailableError, match="selective_scan"):
            selective_scan(**inputs, impl="triton")


def cpu_can_interpret() -> bool:
    """Whether there is a Triton kernel, and an interpreter that runs it here."""
    from hooked_ssm.ops.selective_scan import BACKENDS

    try:
        BACKENDS.pick("triton", torch.device("cpu"))
    except KernelUnavailableError:
        return False
    return True


@pytest.mark.parametrize("length", [1, 2, 33])
def test_pattern_times_values_is_the_output(length):
    inputs = make(2, length, 4, 5)
    del inputs["initial_state"]
    dt, A, B, C = (inputs[n] for n in ("dt", "A", "B", "C"))
    pattern = selective_scan_pattern(torch.exp(dt[..., None] * A), dt[..., None] * B[:, :, None], C)
    assert not pattern.triu(1).any()
    got = torch.einsum("beqk,bke->bqe", pattern, inputs["x"])
    assert_near("pattern @ x", got, selective_scan(**inputs, impl="reference").y, 1e-12)


# What independent implementations returned.


def run_fixture(tensors: dict, config: dict, impl: str):
    """The authors' scan by ours: softplus, bias, skip and gate applied as its conventions say."""
    u, dt = tensors["u"].mT, tensors["delta"].mT
    if "delta_bias" in tensors:
        dt = dt + tensors["delta_bias"]
    if config["delta_softplus"]:
        dt = F.softplus(dt)
    B, C = (_shared(tensors[n], u, config) for n in ("B", "C"))
    if config["constant_B_C"]:  # per channel and the same at every position: a group a channel
        B, C = (t.expand(*u.shape[:2], *t.shape) for t in (tensors["B"], tensors["C"]))
    out = selective_scan(u, dt, tensors["A"], B, C, return_states=True, impl=impl)
    y = out.y + tensors["D"] * u if "D" in tensors else out.y
    y = y * F.silu(tensors["z"].mT) if "z" in tensors else y
    return y.mT, out


def _shared(t: torch.Tensor, u: torch.Tensor, config: dict) -> torch.Tensor:
    """[batch, (group,) state, seq] -> [batch, seq, (group,) state]"""
    return t.movedim(-1, 1) if not config["constant_B_C"] else t


@pytest.mark.parametrize("name", fixture_names("op_selective_scan"))
@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "cpu")],
)
def test_fixture(name, dtype, impl):
    fixture = Fixture(name)
    out = "out64" if dtype == torch.float64 else "out"
    y, scan = run_fixture(fixture.group("in.", dtype), fixture.config, impl)
    fixture.check(f"{out}.y", y)
    fixture.check(f"{out}.last_state", scan.final_state)
    states = scan.states.movedim(1, 2)
    if dtype == torch.float64:
        fixture.check("out64.states", states)
    else:
        assert_near("states", states, fixture.tensors["out64.states"], 2e-6)


WITH_GRADIENTS = [
    name
    for name in fixture_names("op_selective_scan")
    if not isinstance(name, str) or any(k.startswith("grad64") for k in Fixture(name).tensors)
]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
@pytest.mark.parametrize(
    ("dtype", "impl", "relative"),
    [(torch.float64, "reference", 1e-8), (torch.float32, "cpu", 2e-5)],
)
def test_fixture_gradients(name, dtype, impl, relative):
    fixture = Fixture(name)
    tensors = fixture.group("in.", dtype)
    weight = tensors.pop("grad_weight")
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    y, _ = run_fixture(leaves, fixture.config, impl)
    (y * weight).sum().backward()
    wanted = fixture.group("grad64.")
    assert wanted.keys() == leaves.keys()
    for key, want in wanted.items():
        assert_near(f"gradient of {key}", leaves[key].grad, want, relative)


@pytest.mark.parametrize("name", fixture_names("op_state_update"))
@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "cpu")],
)
def test_one_step_fixture(name, dtype, impl):
    """A decoding step is a scan over one token from the carried state."""
    fixture = Fixture(name)
    given = fixture.group("in.", dtype)
    dt = given["dt"] + given["dt_bias"] if "dt_bias" in given else given["dt"]
    dt = F.softplus(dt) if fixture.config["dt_softplus"] else dt
    x, dt, B, C = (t[:, None] for t in (given["x"], dt, given["B"], given["C"]))
    out = selective_scan(x, dt, given["A"], B, C, initial_state=given["state"], impl=impl)
    y = out.y[:, 0] + given["D"] * given["x"] if "D" in given else out.y[:, 0]
    y = y * F.silu(given["z"]) if "z" in given else y
    kind = "out64" if dtype == torch.float64 else "out"
    fixture.check(f"{kind}.y", y)
    fixture.check(f"{kind}.state", out.final_state)
