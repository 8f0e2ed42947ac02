"""Comparisons every op's tests share: one implementation against the float64 reference.

An op is called as `op(**inputs, **options)`; `inputs` maps argument names to float64 tensors
([batch, pos, ...] ones and parameters alike, the initial state included), `options` holds the
rest (`impl`, `return_states`, ...). Its result is a NamedTuple of tensors (None ones are left out)
or one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensors = Mapping[str, Tensor]

LENGTHS = (1, 2, 17, 63, 64, 100, 257)
CUTS = ((1, 1, 2, 5), (16,), (1, 64))
"""Lengths of the first segments; `segment_lengths` adds the rest of the sequence."""

RELATIVE = {torch.float64: 1e-11, torch.float32: 2e-5}
"""Allowed error, as a fraction of the largest value of the tensor compared."""


def randn(*shape: int, seed: int) -> Tensor:
    """Standard normal float64 numbers from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named_outputs(result: Any) -> dict[str, Tensor]:
    """The tensors of an op's result by field name; a lone tensor is called y."""
    if isinstance(result, Tensor):
        return {"y": result}
    return {name: value for name, value in result._asdict().items() if value is not None}


def assert_near(name: str, got: Tensor, want: Tensor, relative: float) -> None:
    """Assert equal shapes and an error of at most `relative` times the largest wanted value."""
    assert got.shape == want.shape, f"{name}: got {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.isfinite().all(), f"{name}: not finite"
    if want.numel() == 0:
        return
    error = (got.double() - want.to(got.device).double()).abs().max().item()
    allowed = relative * max(want.abs().max().item(), 1e-3)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def outputs_and_grads(
    op: Callable[..., Any], inputs: Tensors, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the op; return its outputs, and the gradient of every input.

    The loss is the sum of all outputs (states and final state too) times fixed random weights.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    outputs = named_outputs(op(**leaves, **options))
    loss = sum(
        (value * randn(*value.shape, seed=1000 + i).to(value)).sum()
        for i, value in enumerate(outputs.values())
    )
    grads = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return (
        {name: value.detach() for name, value in outputs.items()},
        dict(zip(leaves, grads, strict=True)),
    )


def assert_same(
    got: tuple[Tensors, Tensors], want: tuple[Tensors, Tensors], relative: float
) -> None:
    """Assert that two results of `outputs_and_grads` hold the same, in any dtype."""
    for kind, ours, theirs in zip(("", "gradient of "), got, want, strict=True):
        assert ours.keys() == theirs.keys(), f"{kind}{list(ours)}, want {list(theirs)}"
        for name, value in theirs.items():
            assert_near(f"{kind}{name}", ours[name], value, relative)


def check_against_reference(
    op: Callable[..., Any],
    inputs: Tensors,
    *,
    impl: str = "cpu",
    dtype: torch.dtype = torch.float64,
    relative: float | None = None,
    **options: Any,
) -> None:
    """Assert that outputs and all gradients of `impl` at `dtype` equal the float64 reference."""
    relative = RELATIVE[dtype] if relative is None else relative
    want = outputs_and_grads(op, inputs, impl="reference", **options)
    cast = {name: value.to(dtype) for name, value in inputs.items()}
    got = outputs_and_grads(op, cast, impl=impl, **options)
    for name, value in got[0].items():
        assert value.dtype == dtype, f"{name} has dtype {value.dtype}"
    assert_same(got, want, relative)


def segment_lengths(first: Iterable[int], length: int) -> list[int]:
    """Cut `length` into these first segments (as far as they fit) and the rest."""
    lengths: list[int] = []
    for piece in first:
        if sum(lengths) + piece < length:
            lengths.append(piece)
    return [*lengths, length - sum(lengths)]


def check_segments(
    op: Callable[..., Any],
    inputs: Tensors,
    lengths: Sequence[int],
    *,
    along_pos: Iterable[str],
    carry: str = "initial_state",
    final: str = "final_state",
    relative: float = 1e-11,
    **options: Any,
) -> None:
    """Assert that running in segments with the state carried over equals one pass.

    Args:
        along_pos: The inputs that have a position axis; outputs but `final` are assumed to.
        carry, final: Argument that takes, and field that returns, what is handed on.
    """
    want = named_outputs(op(**inputs, **options))
    pieces = {name: inputs[name].split(list(lengths), dim=1) for name in along_pos}
    carried = inputs.get(carry)
    collected: dict[str, list[Tensor]] = {name: [] for name in want}
    for i in range(len(lengths)):
        segment = {**inputs, **{name: parts[i] for name, parts in pieces.items()}}
        segment.pop(carry, None)
        if carried is not None:
            segment[carry] = carried
        for name, value in named_outputs(op(**segment, **options)).items():
            collected[name].append(value)
        carried = collected[final][-1]
    for name, parts in collected.items():
        got = parts[-1] if name == final else torch.cat(parts, dim=1)
        assert_near(f"{name} in segments {list(lengths)}", got, want[name], relative)


def check_states_are_prefix_finals(
    op: Callable[..., Any],
    inputs: Tensors,
    positions: Iterable[int],
    *,
    along_pos: Iterable[str],
    relative: float = 1e-11,
    **options: Any,
) -> None:
    """Assert that the state at t is the final state of a run on the first t + 1 tokens."""
    states = op(**inputs, return_states=True, **options).states
    along_pos = list(along_pos)
    for t in positions:
        prefix = {**inputs, **{name: inputs[name][:, : t + 1] for name in along_pos}}
        final = op(**prefix, **options).final_state
        assert_near(f"state at {t}", states[:, t], final, relative)


def check_causal(
    op: Callable[..., Any],
    inputs: Tensors,
    *,
    along_pos: Iterable[str],
    leak: float = 0.0,
    **options: Any,
) -> None:
    """Assert by autograd that no output depends on a later input (by more than `leak`).

    Also asserts that each of these inputs matters to the last output at all.
    """
    along_pos = list(along_pos)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    y = named_outputs(op(**leaves, **options))["y"]
    wanted = [leaves[name] for name in along_pos]
    for t in range(y.shape[1]):
        grads = torch.autograd.grad(
            y[:, t].sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for name, grad in zip(along_pos, grads, strict=True):
            later = grad[:, t + 1 :].abs()
            worst = later.max().item() if later.numel() else 0.0
            assert worst <= leak, f"y at {t} depends on a later {name}: {worst:.3g}"
            if t == y.shape[1] - 1:
                assert grad.abs().max() > 0, f"y does not depend on {name}"


class _Made(TorchDispatchMode):
    """Watches what every operation returns.

    Attributes:
        largest: Elements of the largest tensor.
        total: Bytes of all storages that were made, whether or not they are still alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = {}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                # the storage, so that an expanded view of something small counts as small
                size = leaf.untyped_storage().nbytes()
                self.largest = max(self.largest, min(leaf.numel(), size // leaf.element_size()))
                made[_storage(leaf)] = size
        self.total += sum(size for storage, size in made.items() if storage not in given)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def largest_tensor(run: Callable[[], Any]) -> int:
    """Elements of the largest tensor that `run` makes, backward included if `run` calls it."""
    with _Made() as made:
        run()
    return made.largest


def made_bytes(run: Callable[[], Any]) -> int:
    """Bytes of all tensors that `run` makes, dead ones included."""
    with _Made() as made:
        run()
    return made.total
