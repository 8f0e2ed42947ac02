"""HookedModel: forward's arguments, tokens, roles, initialisation, generation, weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import HookNameError, ShapeError, TaskError
from hooked_ssm.hook_names import ROLES
from hooked_ssm.initialisation import initialise
from hooked_ssm.mixers import MIXERS
from tests.models import D_VOCAB, LENGTH, MODELS, assert_near, fresh, has_role, tiny, tokens


@pytest.mark.parametrize("name", MODELS)
def test_return_types(name):
    model, ids = tiny(name), tokens()
    logits = model(ids)
    loss = model(ids, return_type="loss")
    both = model(ids, return_type="both")
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_near("loss", loss, want, 1e-6, 1e-6)
    assert torch.equal(both[0], logits) and torch.equal(both[1], loss)
    assert model(ids, return_type=None) is None
    per_token = model(ids, return_type="loss", loss_per_token=True)
    assert per_token.shape == (2, LENGTH - 1)
    assert_near("mean", per_token.mean(), loss, 1e-6, 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_starting_and_stopping_at_a_layer_is_one_run(name):
    model, ids = tiny(name), tokens()
    want, cache = model.run_with_cache(ids, names_filter=lambda n: "hook_resid_p" in n)
    for layer in range(model.cfg.n_layers):
        resid = model(ids, stop_at_layer=layer)
        assert torch.equal(resid, cache["resid_pre", layer])
        assert_near("logits", model(resid, start_at_layer=layer), want, 1e-6)
    middle = model(cache["resid_pre", 0], start_at_layer=0, stop_at_layer=1)
    assert torch.equal(middle, cache["resid_post", 0])


def test_logits_only_where_wanted():
    model, ids = tiny("mamba"), tokens()
    logits = model(ids)
    mask = torch.zeros_like(ids).bool()
    mask[0, 2] = mask[1, 5] = True
    assert_near("mask", model(ids, logit_positions=mask), logits[mask], 1e-6)
    index = torch.tensor([[1, 3], [6, 6]])
    want = torch.stack([logits[i, index[i]] for i in range(2)])
    assert_near("index", model(ids, logit_positions=index), want, 1e-6)


def test_tokens_in_every_form():
    model, ids = tiny("mamba"), tokens(1)
    want = model(ids)
    assert torch.equal(model(ids[0]), want)
    assert torch.equal(model(ids.tolist()), want)
    assert torch.equal(model(ids[0].tolist()), want)
    assert torch.equal(model(ids.int()), want)
    model.token_names = ["<bos>", *(f"t{i}" for i in range(1, D_VOCAB))]
    text = " ".join(model.to_str_tokens(ids))
    assert torch.equal(model(text), want)
    assert torch.equal(model.to_tokens([text, text]), ids.repeat(2, 1))
    assert model.to_tokens("t3 t4", prepend_bos=True).tolist() == [[0, 3, 4]]
    assert model.to_single_token("t3") == 3
    with pytest.raises(TaskError, match="unknown token 'x'"):
        model("t1 x")
    with pytest.raises(ShapeError, match=r"texts have \[1, 2\] tokens"):
        model(["t1", "t1 t2"])
    with pytest.raises(TaskError, match="is 2 tokens, wanted exactly one"):
        model.to_single_token("t1 t2")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2, 3), "torch.float32 of shape"),
        (torch.zeros(2, 3, 1, dtype=torch.long), "want integers"),
        (torch.zeros(2, 0, dtype=torch.long), "at least one position"),
        (torch.zeros(2, 3, dtype=torch.bool), "torch.bool"),
        (torch.full((1, 3), D_VOCAB), f"d_vocab={D_VOCAB}: allowed 0..{D_VOCAB - 1}"),
        (torch.tensor([[0, -1]]), "run from -1 to 0"),
    ],
)
def test_bad_tokens_are_refused_by_name(bad, message, as_shipped):
    for run in (tiny("mamba"), tiny("mamba").step):
        with pytest.raises(ShapeError, match=message):
            run(bad)


def test_bad_arguments_are_refused_by_name(as_shipped):
    model, ids = tiny("attention", n_ctx=8), tokens()
    with pytest.raises(ShapeError, match="'logits', 'loss', 'both', None"):
        model(ids, return_type="losses")
    with pytest.raises(ShapeError, match="9 tokens.*n_ctx=8"):
        model(tokens(length=9))
    _, past = model.step(ids)
    with pytest.raises(ShapeError, match="n_ctx=8"):
        model.step(ids[:, :2], past)
    with pytest.raises(ShapeError, match="residual stream"):
        model(ids, start_at_layer=1)
    with pytest.raises(ShapeError, match="a loss needs tokens"):
        model(model(ids, stop_at_layer=1), start_at_layer=1, return_type="loss")
    with pytest.raises(ShapeError, match="at least two tokens"):
        model(ids[:, :1], return_type="loss")
    with pytest.raises(TaskError, match="no tokenizer"):
        model("some text")
    with pytest.raises(ValueError, match="temperature"):
        model.generate(ids, 1, temperature=1.0)


@pytest.mark.parametrize("name", MODELS)
def test_roles_resolve_or_say_why_not(name):
    model = tiny(name)
    for layer, block in enumerate(model.blocks):
        for role in ROLES:
            if not has_role(block.mixer, role):
                with pytest.raises(HookNameError, match=f"has no {role}.*Its roles: "):
                    model.hook_name(layer, role, 0)
                continue
            hook = model.hook_name(layer, role, 0)
            assert role in model.find_hook(hook).spec.roles
            assert hook.startswith(f"blocks.{layer}.mixer.hook_")
    last = model.cfg.n_layers - 1
    assert model.hook_name(-1, "resid_pre") == f"blocks.{last}.hook_resid_pre"
    assert model.hook_name(0, "mixer_out") == "blocks.0.hook_mixer_out"
    with pytest.raises(HookNameError, match=f"allowed 0..{last}"):
        model.hook_name(99, "query")


def test_roles_with_positions_and_plain_words():
    model = tiny("mamba")
    assert model.hook_name(1, "carry", 4) == "blocks.1.mixer.hook_ssm_carry.4"
    assert model.hook_name(1, "ssm_dt") == "blocks.1.mixer.hook_ssm_dt"
    with pytest.raises(HookNameError, match="pass position="):
        model.hook_name(1, "carry")


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_parameters(name):
    before = torch.random.get_rng_state()
    a, b, c = fresh(name), fresh(name), fresh(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was used"
    same = [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(a.W_E, c.W_E)
    for parameter_name, p in a.named_parameters():
        assert p.isfinite().all(), f"{parameter_name} was left uninitialised"


@pytest.mark.parametrize("init", ["paper", "uniform"])
def test_mambas_own_initialisation_survives(init):
    """dt log-uniform in [1e-3, 0.1], A = -1..-n, D = 1, also when initialised again."""
    cfg = ModelConfig(architecture="mamba", n_layers=2, d_model=64, d_vocab=11, n_ctx=8, init=init)
    model = HookedModel(cfg)
    lone = MIXERS["mamba"](64, 8, cfg.mixer_options(0))
    lone.initialise(torch.Generator().manual_seed(7))
    again = HookedModel(cfg)
    initialise(again.modules(), cfg, torch.Generator().manual_seed(9))
    mixers = [*(b.mixer for m in (model, again) for b in m.blocks), lone]
    logs = []
    for mixer in mixers:
        dt = F.softplus(mixer.dt_proj.bias)
        assert (dt >= 1e-3 * (1 - 1e-4)).all() and (dt <= 0.1 * (1 + 1e-4)).all()
        logs.append(dt.log())
        want = torch.arange(1, 17).float().log()
        torch.testing.assert_close(mixer.A_log, want.expand(128, 16))
        assert (mixer.D == 1).all()
        bound = mixer.dt_proj.in_features**-0.5
        assert mixer.dt_proj.weight.abs().max() <= bound
        assert mixer.dt_proj.weight.abs().max() > 0.9 * bound
        assert mixer.conv.weight.abs().max() <= 0.5
    spread = torch.cat(logs)
    assert abs(spread.mean() - math.log(1e-2)) < 0.15, "log-uniform: the middle is 1e-2"
    assert spread.min() < math.log(1.3e-3) and spread.max() > math.log(0.075)
    assert all(p._no_weight_decay for p in (lone.A_log, lone.D, lone.dt_proj.bias))


def test_the_papers_initialisation():
    """Normal with std 0.02, outputs into the residual stream smaller by sqrt(2 n_layers)."""
    cfg = ModelConfig(architecture="attention", n_layers=2, d_model=64, d_vocab=50, n_ctx=16)
    model = HookedModel(cfg)
    block = model.blocks[0]
    for weight, std in (
        (model.W_E, 0.02),
        (block.mixer.q_proj.weight, 0.02),
        (block.mlp.fc_in.weight, 0.02),
        (block.mixer.out_proj.weight, 0.01),
        (block.mlp.fc_out.weight, 0.01),
    ):
        assert abs(weight.std() / std - 1) < 0.08
    assert not block.mixer.out_proj.bias.any() and not block.mlp.fc_in.bias.any()


def test_generation():
    model, ids = tiny("mamba"), tokens(length=4)
    greedy = model.generate(ids, 5)
    assert greedy.shape == (2, 9) and torch.equal(greedy[:, :4], ids)
    assert torch.equal(model(greedy)[:, 3:-1].argmax(-1), greedy[:, 4:])
    draw = [
        model.generate(ids, 5, temperature=0.7, generator=torch.Generator().manual_seed(s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    assert torch.equal(model.generate(ids, 0), ids)


def test_weights_under_transformer_lens_names():
    model = tiny("attention", n_heads=2)
    mixer, x = model.blocks[0].mixer, torch.randn(3, 12)
    for ours, theirs in (
        (mixer.q_proj, mixer.W_Q),
        (mixer.k_proj, mixer.W_K),
        (mixer.v_proj, mixer.W_V),
    ):
        by_head = torch.einsum("bm,hmd->bhd", x, theirs)
        assert_near("projection", by_head.flatten(1), ours(x), 1e-5)
    z = torch.randn(3, 2, 6)
    out = torch.einsum("bhd,hdm->bm", z, mixer.W_O) + mixer.out_proj.bias
    assert_near("output", out, mixer.out_proj(z.flatten(1)), 1e-5)
    assert torch.equal(model.W_U, model.W_E.T) and not model.b_U.any()
    untied = tiny("attention", tie_embeddings=False)
    assert untied.W_U.shape == (12, D_VOCAB) and not torch.equal(untied.W_U, untied.W_E.T)


def test_moving_and_casting_keep_the_config_in_step():
    model = tiny("mamba").to(torch.float64)
    assert model.cfg.dtype == torch.float64 and model(tokens()).dtype == torch.float64
    assert model.to("cpu", torch.float32).cfg.dtype == torch.float32
    assert "mamba" in model.title and tiny("mixed").title.startswith("attention+base_conv")


def test_the_mean_of_norms_matches_their_formula():
    """With somebody listening to the scale the norm is written out; both ways are one norm."""
    model, ids = tiny("mixed", dtype=torch.float64), tokens()
    names = [n for n in model.hook_dict if n.endswith("hook_scale")]
    plain = model(ids)
    listened, cache = model.run_with_cache(ids, names_filter=names)
    assert_near("logits", listened, plain, 1e-10)
    _, resid = model.run_with_cache(ids, names_filter="blocks.0.hook_resid_pre")
    x = resid["resid_pre", 0]
    want = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert_near("scale", cache["scale", 0, "ln1"], want, 1e-12)
