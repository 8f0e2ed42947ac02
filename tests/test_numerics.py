"""Padding, causality, precision, lengths: what must hold for every mixer (cases.jsonl)."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import ShapeError
from hooked_ssm.hook_names import WORDS
from hooked_ssm.ops.dispatch import use_impl
from tests.models import MODELS, RECURRENT, assert_near, fresh, tiny, tokens
from tests.ops.checks import randn

LONG, SHORT = 9, 5


def padded(side: str, short, length: int):
    """A short document padded with a real token id to a length, and its mask. [1, length]"""
    filler = torch.full((1, length - short.shape[1]), 3)
    parts = [filler, short] if side == "left" else [short, filler]
    mask = torch.cat([torch.zeros_like(filler), torch.ones_like(short)], dim=1).bool()
    return torch.cat(parts, dim=1), mask if side == "left" else mask.flip(1)


def states_of(model, ids, **kwargs):
    """Logits, and what every layer's state is at every position, if it has one."""
    names = [
        f"blocks.{layer}.mixer.hook_ssm_state"
        for layer, block in enumerate(model.blocks)
        if "hook_ssm_state" in block.mixer.specs
    ]
    if not names:
        return model(ids, **kwargs), []
    logits, cache = model.run_with_cache(ids, names_filter=names, **kwargs)
    return logits, [cache[n] for n in names]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    """Logits and states of real tokens, in a batch with a longer document and alone."""
    model = tiny(name)
    short, long = tokens(1, SHORT, seed=1), tokens(1, LONG, seed=2)
    ids, mask = padded(side, short, LONG)
    own = slice(LONG - SHORT, None) if side == "left" else slice(0, SHORT)
    want, want_states = states_of(model, short)
    want_long, want_long_states = states_of(model, long)
    both = torch.cat([ids, long]), torch.cat([mask, torch.ones_like(mask)])
    for row, (tokens_, mask_) in enumerate(((ids, mask), both)):
        logits, states = states_of(model, tokens_, attention_mask=mask_)
        assert logits.isfinite().all()
        assert_near(f"{row}: logits", logits[:1, own], want, 1e-5, 1e-5)
        for got, expected in zip(states, want_states, strict=True):
            assert_near("states", got[:1, own], expected, 1e-5, 1e-5)
            if side == "right":  # padding keeps the state: what is handed on is the document's
                assert_near("final state", got[:1, -1], expected[:, -1], 1e-5, 1e-5)
    assert_near("the long document", logits[1:], want_long, 1e-5, 1e-5)
    for got, expected in zip(states, want_long_states, strict=True):
        assert_near("states of the long document", got[1:], expected, 1e-5, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_goes_on_after_left_padding(name):
    model = tiny(name)
    short, more = tokens(1, SHORT, seed=1), tokens(1, 4, seed=3)
    ids, mask = padded("left", short, LONG)
    want = model(torch.cat([short, more], dim=1))[:, SHORT:]
    _, past = model.step(ids, attention_mask=mask)
    first, past = model.step(more[:, :1], past)
    rest, _ = model.step(more[:, 1:], past)
    assert_near("logits", torch.cat([first, rest], dim=1), want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_padding_leaves_the_loss_to_real_tokens(name):
    model = tiny(name)
    short = tokens(1, SHORT, seed=1)
    want = model(short, return_type="loss")
    for side in ("left", "right"):
        ids, mask = padded(side, short, LONG)
        loss = model(ids, return_type="loss", attention_mask=mask)
        assert_near(side, loss, want, 1e-5)
        gradient = torch.autograd.grad(loss, model.W_E)[0]
        assert gradient.isfinite().all()


def test_masks_that_do_not_fit_are_refused():
    model, ids = tiny("mamba"), tokens(2, 6)
    with pytest.raises(ShapeError, match=r"attention_mask has shape \(2, 5\), tokens \(2, 6\)"):
        model(ids, attention_mask=torch.ones(2, 5))
    right = torch.ones(2, 6).bool()
    right[0, -1] = False
    with pytest.raises(ShapeError, match="padding is allowed on the left of the first call only"):
        model.step(ids, attention_mask=right)


BITWISE = 0.0
LEAK = 1e-5  # of convolutions by FFT


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [7, 64, 130])
def test_no_output_depends_on_a_later_token(name, length):
    model, ids = fresh(name), tokens(length=length)
    changed = ids.clone()
    changed[:, length - 3] = (changed[:, length - 3] + 1) % model.cfg.d_vocab
    with torch.no_grad():
        a, b = model(ids), model(changed)
        assert (a - b)[:, : length - 3].abs().max() <= LEAK
        assert (a - b)[:, length - 3].abs().max() > 1e-4
        if length < 64:
            with use_impl("reference"):
                a, b = model(ids), model(changed)
            assert (a - b)[:, : length - 3].abs().max() == BITWISE


@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_flows_back_from_an_earlier_output(name):
    model, length = tiny(name, dtype=torch.float64), 9
    resid = randn(1, length, model.cfg.d_model, seed=0).requires_grad_()
    out = model(resid, start_at_layer=0, stop_at_layer=len(model.blocks))
    for t in range(length):
        (grad,) = torch.autograd.grad(out[:, t].sum(), resid, retain_graph=True)
        assert grad[:, t + 1 :].abs().sum() <= 1e-12
        assert grad[:, t].abs().sum() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_reference_and_fast_paths_agree(name):
    model, ids = tiny(name), tokens(length=70)
    with torch.no_grad():
        fast = model(ids)
        with use_impl("reference"):
            assert_near("logits", fast, model(ids), 2e-5, 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_keeps_a_float32_core(name):
    """Against the float32 run on weights rounded to bfloat16: within 2e-2 relative, 256 tokens."""
    narrow = fresh(name, n_ctx=256).to(torch.bfloat16)
    wide = fresh(name, n_ctx=256)
    wide.load_state_dict({k: v.float() for k, v in narrow.state_dict().items()})
    ids = tokens(length=256)
    with torch.no_grad():
        got, want = narrow(ids), wide(ids)
    assert got.dtype == torch.bfloat16 and got.isfinite().all()
    error = (got.float() - want).norm() / want.norm()
    assert error <= 2e-2, f"relative error {error:.3g}"
    core = {n for n, w in WORDS.items() if w.numbers == "core" and n.startswith("hook_ssm_")}
    for layer, block in enumerate(narrow.blocks):
        for hook in core & set(block.mixer.specs):
            point = f"blocks.{layer}.mixer.{hook}" + (
                ".3" if block.mixer.specs[hook].per_position else ""
            )
            _, cache = narrow.run_with_cache(ids, names_filter=point)
            kind = block.mixer.specs[hook].numbers
            wanted = {"core": torch.float32, "complex": torch.complex64, "model": torch.bfloat16}
            assert cache[point].dtype == wanted[kind], hook


def test_mambas_decay_comes_from_the_stored_parameter_in_float32():
    model, ids = tiny("mamba", dtype=torch.bfloat16), tokens()
    _, cache = model.run_with_cache(
        ids, names_filter=["blocks.0.mixer.hook_ssm_dt", "blocks.0.mixer.hook_ssm_decay"]
    )
    A = -torch.exp(model.blocks[0].mixer.A_log.float())
    dt = cache["ssm_dt", 0]
    assert dt.dtype == torch.float32
    assert torch.equal(cache["ssm_decay", 0], torch.exp(dt[..., None] * A))


@pytest.mark.parametrize("name", ["mamba", "based", "attention", "mixed"])
def test_autocast_training_stays_finite_with_float32_weights(name):
    model = fresh(name, init="uniform").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(50 if name != "mixed" else 10):
        ids = torch.randint(0, 6, (8, 6), generator=generator).repeat(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 3, 65])
def test_any_length_and_batch_of_one(name, length):
    model = tiny(name)
    logits = model(tokens(1, length))
    assert logits.shape == (1, length, model.cfg.d_vocab) and logits.isfinite().all()
    assert torch.equal(model(tokens(1, length)[0]), logits), "one document without its batch axis"


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrences_go_on_beyond_n_ctx_or_say_why_not(name):
    model = tiny(name, n_ctx=4)
    try:
        logits = model(tokens(length=9))
    except ShapeError as error:
        assert "n_ctx" in str(error)
    else:
        assert logits.isfinite().all()


def test_train_and_eval_mode_compute_the_same():
    model, ids = tiny("mixed"), tokens()
    assert torch.equal(model.train()(ids), model.eval()(ids))


@pytest.mark.parametrize("d_state", [1, 3])
@pytest.mark.parametrize("d_model", [1, 2, 5])
def test_odd_sizes(d_state, d_model):
    cfg = ModelConfig(
        architecture="mamba",
        n_layers=1,
        d_model=d_model,
        d_vocab=7,
        n_ctx=8,
        options={"d_state": d_state, "expand": 1},
    )
    model = HookedModel(cfg)
    assert model(tokens(1, 5) % 7).shape == (1, 5, 7)
