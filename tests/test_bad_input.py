"""Tokens, masks, pasts and arguments that do not fit are named, not broadcast or guessed."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import ConfigError, ShapeError, TaskError
from hooked_ssm.loss import next_token_loss

pytestmark = pytest.mark.usefixtures("as_shipped")


def test_masks_hold_zeros_and_ones_only(model, ids):
    additive = torch.zeros(2, 8)
    additive[:, :3] = -1e9
    with pytest.raises(ShapeError, match="not an additive mask"):
        model(ids, attention_mask=additive)
    ones = torch.ones(2, 8, dtype=torch.long)
    torch.testing.assert_close(model(ids, attention_mask=ones), model(ids))


@pytest.mark.parametrize("layer", [3, 99, -3, "1", 1.0, True])
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
        torch.tensor([[7], [8]]),
        torch.tensor([[-9], [0]]),
        torch.ones(2, 8, dtype=torch.uint8),
        [0, 7],
    ],
)
def test_logit_positions_are_a_mask_or_indices(model, ids, positions):
    with pytest.raises(ShapeError, match="logit_positions"):
        model(ids, logit_positions=positions)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_ids_of_every_integer_type_are_the_same_tokens(model, ids, dtype):
    small = ids.to(dtype)
    assert torch.equal(model(small), model(ids))
    assert torch.equal(model(small, return_type="loss"), model(ids, return_type="loss"))
    assert torch.equal(model.generate(small, 2), model.generate(ids, 2))


def test_lists_and_arrays_are_tokens_and_masks(model, ids):
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, :2] = False
    assert torch.equal(model(ids.tolist()), model(ids.numpy()))
    assert torch.equal(
        model(ids, attention_mask=mask.tolist()), model(ids, attention_mask=mask.int())
    )
    alone = model.step(ids[0].tolist(), attention_mask=mask[0].tolist())[0]
    torch.testing.assert_close(alone, model.step(ids, attention_mask=mask)[0][:1])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3]], "cannot make a tensor of this list.*padded on the left"),
        (None, "cannot make a tensor of this NoneType"),
        ({"ids": 3}, "cannot make a tensor of this dict"),
        ([1, "a"], "cannot make a tensor of this list"),
        ([], "want integers"),
        (3, "want integers"),
        ([[0.5]], "got torch.float32"),
        ([[True]], "got torch.bool"),
        (torch.zeros(2, 3, dtype=torch.complex64), "got torch.complex64"),
        (torch.zeros(0, 3, dtype=torch.long), "at least one document"),
        (torch.zeros(2, 0, dtype=torch.long), "one position"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"\(1, 2, 3\)"),
        (torch.zeros(1, 2, dtype=torch.long, device="meta"), "tokens are on meta"),
    ],
)
def test_what_is_no_tokens_is_refused_on_every_way_in(model, tokens, message):
    for run in (model, model.step, model.run_with_cache, lambda t: model.generate(t, 0)):
        with pytest.raises(ShapeError, match=message):
            run(tokens)


def test_texts_are_strings_of_one_document(model, ids):
    model.token_names = [f"t{i}" for i in range(5)]
    with pytest.raises(TaskError, match="a text must be a string, got 3"):
        model(["t1", 3])
    with pytest.raises(TaskError, match="a text must be a string, got 3"):
        model.to_single_token(3)
    with pytest.raises(ShapeError, match=r"takes one document, got tokens of shape \[2, 8\]"):
        model.to_str_tokens(ids)
    with pytest.raises(ShapeError, match="token 9 has no name; model.token_names has 5"):
        model.to_str_tokens([1, 9])
    with pytest.raises(TypeError, match="padding_side"):
        model.to_tokens("t1", padding_side="left")


@pytest.mark.parametrize(
    "mask", [torch.ones(8), torch.ones(2, 7), torch.ones(2, 8, 1), [[1] * 8], [[1], [1, 1]], "left"]
)
def test_masks_of_another_shape_are_refused(model, ids, mask):
    for run in (model, model.step, lambda t, **kw: model.generate(t, 1, **kw)):
        with pytest.raises((ShapeError, ConfigError), match="attention_mask"):
            run(ids, attention_mask=mask)


@pytest.mark.parametrize(
    "resid",
    [
        torch.zeros(2, 8, 15),
        torch.zeros(8, 16),
        torch.zeros(0, 8, 16),
        torch.zeros(2, 8, 16, dtype=torch.float64),
        torch.zeros(2, 8, 16, dtype=torch.long),
        torch.zeros(2, 8, 16, device="meta"),
        [[1.0]],
    ],
)
def test_residual_streams_that_do_not_fit_are_refused(model, resid):
    with pytest.raises(ShapeError, match="start_at_layer"):
        model(resid, start_at_layer=1)


def other(**changes) -> HookedModel:
    cfg = {"architecture": "mamba", "d_model": 16, "n_layers": 2, "d_vocab": 11, "n_ctx": 16}
    return HookedModel(ModelConfig(**{**cfg, **changes})).eval()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "attention"}, "a model with mixers="),
        ({"n_layers": 1}, "a model with mixers="),
        ({"d_model": 8}, "a model with d_model=8, this one has 16"),
        ({"dtype": torch.float64}, "a model with dtype=torch.float64"),
    ],
)
def test_what_another_model_handed_on_is_refused(model, ids, changes, message):
    _, past = other(**changes).step(ids)
    with pytest.raises(ShapeError, match=message):
        model.step(ids[:, :1], past)
    nameless = past._replace(cfg=None)
    if len(past.layers) != 2:
        with pytest.raises(ShapeError, match="past is of 1 layers, the model has 2"):
            model.step(ids[:, :1], nameless)


def test_pasts_are_of_the_same_documents(model, ids):
    _, past = model.step(ids)
    with pytest.raises(ShapeError, match="past is of 2 documents .* the tokens of 1"):
        model.step(ids[:1, :1], past)
    for wrong in ((1, 2), past.layers, "past"):
        with pytest.raises(ShapeError, match="past is what the last model.step returned"):
            model.step(ids[:, :1], wrong)
    with pytest.raises(ShapeError, match="left of the first call only"):
        model.step(ids[:, :1], past, attention_mask=torch.ones(2, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1; allowed: an integer >= 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"temperature": float("nan")}, "temperature=nan; allowed: a finite number >= 0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": 1.0}, "with no generator"),
        ({"generator": 3}, "generator=3; allowed: a torch.Generator"),
    ],
)
def test_arguments_of_generation_are_named(model, ids, arguments, message):
    with pytest.raises(ConfigError, match=message):
        model.generate(ids, **{"max_new_tokens": 2, **arguments})


def test_generation_beyond_the_model_is_refused_before_it_starts(ids):
    model = other(architecture="attention")
    assert model.generate(ids, 9).shape == (2, 17), "the last token is not run"
    with pytest.raises(ShapeError, match="the sequence has 17 tokens"):
        model.generate(ids, 10)


@pytest.mark.parametrize("sizes", [(2, -1), (0, 4), (1.5, 4), (2, "8"), (True, 2)])
def test_sizes_of_a_cache_are_counts(model, sizes):
    with pytest.raises(
        ShapeError, match=r"cache_size: (batch|length)=.*; allowed: an integer >= 1"
    ):
        model.cache_size(*sizes)


def test_losses_are_of_logits_and_their_tokens(ids):
    logits = torch.zeros(2, 8, 11)
    with pytest.raises(ShapeError, match="a next-token loss needs logits"):
        next_token_loss(logits, ids[:, :7])
    with pytest.raises(ShapeError, match="a next-token loss needs logits"):
        next_token_loss(logits[0], ids[0])
