"""What users get wrong is said, not broadcast, swallowed or guessed."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import HookNameError, ShapeError
from tests.models import ONE_KIND, hook_names, tiny, tokens

pytestmark = pytest.mark.usefixtures("as_shipped")


@pytest.fixture
def model() -> HookedModel:
    cfg = ModelConfig(architecture="mamba", d_model=16, n_layers=2, d_vocab=11, n_ctx=16)
    return HookedModel(cfg).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ONE_KIND)
def test_a_hook_that_returns_another_shape_is_refused_everywhere(name):
    model, batch = tiny(name, layers=1), tokens()
    for hook in hook_names(model):
        with pytest.raises(ShapeError, match=r"a hook on .* returned"):
            model.run_with_hooks(batch, fwd_hooks=[(hook, lambda x, hook: x[None])])


def test_masks_hold_zeros_and_ones_only(model, ids):
    additive = torch.zeros(2, 8)
    additive[:, :3] = -1e9
    with pytest.raises(ShapeError, match="not an additive mask"):
        model(ids, attention_mask=additive)
    ones = torch.ones(2, 8, dtype=torch.long)
    torch.testing.assert_close(model(ids, attention_mask=ones), model(ids))


@pytest.mark.parametrize("layer", [3, 99, -3])
def test_layers_outside_the_model_are_refused(model, ids, layer):
    with pytest.raises(ShapeError, match=r"stop_at_layer=.*; allowed: 0..2"):
        model(ids, stop_at_layer=layer)
    with pytest.raises(ShapeError, match=r"start_at_layer=.*; allowed: 0..2"):
        model(torch.zeros(2, 8, 16), start_at_layer=layer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"return_type": "loss", "stop_at_layer": 1},
        {"stop_at_layer": 1, "logit_positions": torch.zeros(2, 1, dtype=torch.long)},
        {"loss_per_token": True},
        {"return_type": "loss", "attention_mask": torch.zeros(2, 8, dtype=torch.bool)},
    ],
)
def test_arguments_that_go_not_together_are_refused(model, ids, arguments):
    with pytest.raises(ShapeError):
        model(ids, **arguments)


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([7, 7]),
        torch.tensor([[7]]),
        torch.ones(2, 7, dtype=torch.bool),
        torch.zeros(2, 1),
    ],
)
def test_logit_positions_are_a_mask_or_indices(model, ids, positions):
    with pytest.raises(ShapeError, match="logit_positions"):
        model(ids, logit_positions=positions)


def test_names_and_positions_of_hooks(model, ids):
    for position in (-1, "x", 1.5):
        with pytest.raises(HookNameError, match="allowed: an int >= 0"):
            model.hook_name(0, "carry", position)
    with pytest.raises(HookNameError, match="got None"):
        model.run_with_hooks(ids, fwd_hooks=[(None, lambda x, hook: x)])


def test_generation_refuses_a_negative_number(model, ids):
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        model.generate(ids, -1)
