"""Ablations act where they are told to, on every kind of activation, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm.analysis import ablation
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.model import HookedModel
from tests.models import LENGTH, tiny, tokens


def ablated(model: HookedModel, name: str, hook) -> tuple[Tensor, Tensor]:
    """An activation before and after an ablation, in one run."""
    seen: dict[str, Tensor] = {}
    before = lambda x, hook: seen.__setitem__("before", x.clone())  # noqa: E731
    after = lambda x, hook: seen.__setitem__("after", x.clone())  # noqa: E731
    with torch.no_grad():
        model.run_with_hooks(tokens(4), fwd_hooks=[(name, before), (name, hook), (name, after)])
    return seen["before"], seen["after"]


def test_zero_at_positions_and_heads_of_a_pattern() -> None:
    model = tiny("based-2heads")
    name = model.hook_name(0, "pattern")
    before, after = ablated(model, name, ablation.zero(positions=[2, -1], heads=[1]))
    assert (after[:, 1, [2, LENGTH - 1]] == 0).all()
    after[:, 1, [2, LENGTH - 1]] = before[:, 1, [2, LENGTH - 1]]
    assert torch.equal(before, after)


def test_one_position_per_document() -> None:
    model = tiny("mamba")
    at = torch.tensor([0, 3, 3, 6])
    before, after = ablated(model, model.hook_name(1, "state"), ablation.zero(positions=at))
    changed = (before != after).flatten(2).any(-1)
    assert changed.nonzero().tolist() == [[0, 0], [1, 3], [2, 3], [3, 6]]


def test_zero_of_a_carry_forgets_everything_before() -> None:
    """Without its conv window and state, the layer starts anew after position 3."""
    model = tiny("mamba-conv1-state1", layers=1)
    ids = tokens(2)
    with torch.no_grad():
        cut = model.run_with_hooks(
            ids, fwd_hooks=[(model.hook_name(0, "carry", position=3), ablation.zero())]
        )
        alone = model(ids[:, 4:])
    torch.testing.assert_close(cut[:, 4:], alone, atol=1e-5, rtol=1e-5)


def test_mean_over_documents_and_positions() -> None:
    model = tiny("attention-2heads")
    name = model.hook_name(0, "z")
    before, after = ablated(model, name, ablation.mean(heads=[0]))
    torch.testing.assert_close(after[:, :, 0], before[:, :, 0].mean(0).expand(4, -1, -1))
    assert torch.equal(after[:, :, 1], before[:, :, 1])
    reference = torch.arange(6.0).view(3, 2, 1, 1).expand(3, 2, 2, 6)
    before, after = ablated(model, name, ablation.mean(reference, over=("batch", "pos")))
    assert (after == 2.5).all()


def test_resample_gives_everybody_another_document() -> None:
    model = tiny("mamba")
    name = model.hook_name(0, "conv")
    hook = ablation.resample(torch.Generator().manual_seed(0))
    before, after = ablated(model, name, hook)
    sources = [[i for i in range(4) if torch.equal(after[j], before[i])] for j in range(4)]
    assert sorted(s[0] for s in sources) == [0, 1, 2, 3]
    assert all(s != [j] for j, s in enumerate(sources))
    drawn = ablation.resample(torch.Generator().manual_seed(0), reference=before[:1])
    _, after = ablated(model, name, drawn)
    assert all(torch.equal(row, before[0]) for row in after)


@pytest.mark.parametrize("role", ["conv", "state"])
def test_noise_is_in_units_of_the_activation(role: str) -> None:
    model = tiny("h3")  # its states are complex
    name = model.hook_name(0, role)
    hook = ablation.noise(0.1, torch.Generator().manual_seed(0), positions=[1])
    before, after = ablated(model, name, hook)
    moved = (after - before)[:, 1]
    assert (after - before).abs().sum() == pytest.approx(moved.abs().sum().item())
    share = moved.abs().pow(2).mean().sqrt() / before.std(correction=0).abs()
    assert share.item() == pytest.approx(0.1, rel=0.3)


def test_global_random_state_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    ablated(tiny("mamba"), "blocks.0.hook_mixer_out", ablation.noise(1.0, torch.Generator()))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (ablation.zero(positions=[LENGTH]), "allowed -7..6"),
        (ablation.zero(heads=[0]), "no heads"),
        (ablation.zero(positions=torch.zeros(2, dtype=torch.long)), "one per document"),
        (ablation.mean(torch.zeros(4, 3, 12)), "may differ only along"),
        (ablation.mean(over=("head",)), "its axes are"),
        (ablation.resample(torch.Generator(), torch.zeros(2, 1, 12)), "the reference has shape"),
    ],
)
def test_what_does_not_fit_is_refused(hook, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        ablated(tiny("mamba"), "blocks.0.hook_mixer_out", hook)
    with pytest.raises(ConfigError, match="scale=-1"):
        ablation.noise(-1, torch.Generator())
