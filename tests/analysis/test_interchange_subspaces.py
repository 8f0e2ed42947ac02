"""transformer-lens' subspace interchange and DAS, unmodified, at residual and state sites."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformer_lens.tools.analysis.interchange import (
    SubspaceInterchange,
    collect_activations,
    fit_das,
    random_basis,
    run_with_intervention,
)

from hooked_ssm.model import HookedModel
from tests.models import D_VOCAB, LENGTH, tiny, tokens


def task(model: HookedModel):
    return lambda ids: model(ids)[:, -1]


class Flattened:
    """A model whose activations at one hook are seen as vectors [batch, d].

    transformer-lens' tool takes [batch, d_model]; a carried state is [batch, d_inner, d_state].
    """

    def __init__(self, model: HookedModel):
        self.model, self.training = model, model.training

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def hooks(self, fwd_hooks):
        def flat(function):
            def hook_function(x: Tensor, hook) -> Tensor | None:
                found = function(x.flatten(1), hook)
                return None if found is None else found.view_as(x)

            return hook_function

        return self.model.hooks(fwd_hooks=[(name, flat(f)) for name, f in fwd_hooks])


@pytest.mark.parametrize("name", ["mamba", "based"])
def test_a_full_subspace_is_activation_patching(name: str) -> None:
    """With every direction of the residual stream, interchange is patching it."""
    model = tiny(name)
    base, source = tokens(3), tokens(3, seed=1)
    hook, at = "blocks.1.hook_resid_pre", torch.full((3,), LENGTH - 1)
    acts = collect_activations(model, hook, source, task(model), positions=at)
    step = SubspaceInterchange(torch.eye(model.cfg.d_model))
    with torch.no_grad():
        got = run_with_intervention(model, hook, step, base, acts, task(model), positions=at)
    _, cache = model.run_with_cache(source, names_filter=hook)

    def put(x: Tensor, hook: object) -> Tensor:
        x = x.clone()
        x[:, -1] = cache[str(hook.name)][:, -1]
        return x

    with torch.no_grad():
        want = model.run_with_hooks(base, fwd_hooks=[(hook, put)])[:, -1]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["resid_pre", "carry"])
def test_das_learns_a_subspace(role: str) -> None:
    """Training lowers the loss, at the residual stream and at a state that is carried on."""
    model = tiny("mamba")
    base, source = tokens(32), tokens(32, seed=1)
    targets = torch.randint(D_VOCAB, (32,), generator=torch.Generator().manual_seed(0))
    name = model.hook_name(1, role, position=LENGTH - 2)
    given = {"rank": 4, "epochs": 6, "batch_size": 16, "lr": 0.05}
    if role == "carry":
        fitted = fit_das(Flattened(model), name, base, source, targets, task(model), **given)
    else:
        at = torch.full((32,), LENGTH - 1)
        fitted = fit_das(
            model, name, base, source, targets, task(model),
            base_positions=at, source_positions=at, **given,
        )  # fmt: skip
    assert fitted.losses[-1] < fitted.losses[0]
    basis = fitted.subspace.basis.detach()
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), atol=1e-5, rtol=0)
    assert not any(hook.has_hooks() for hook in model.hook_points())


def test_a_random_basis_of_a_state_is_a_smaller_edit() -> None:
    """The tool is differentiable through a carried state: gradients reach the basis."""
    model = tiny("mamba")
    flat, name = Flattened(model), model.hook_name(0, "carry", position=3)
    base, source = tokens(2), tokens(2, seed=1)
    acts = collect_activations(flat, name, source, task(model))
    basis = random_basis(acts.shape[1], 3, seed=0).requires_grad_()
    logits = run_with_intervention(flat, name, SubspaceInterchange(basis), base, acts, task(model))
    (slope,) = torch.autograd.grad(logits.sum(), basis)
    assert slope.abs().max() > 0
