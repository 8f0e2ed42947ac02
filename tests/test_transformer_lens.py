"""TransformerLens' own tools, unmodified, on our models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformer_lens import ActivationCache, HookedRootModule, patching
from transformer_lens.head_detector import detect_head
from transformer_lens.tools import analysis

from hooked_ssm import HookedModel, ModelConfig
from tests.models import D_VOCAB, LENGTH, MODELS, tiny, tokens

WITH_HEADS = ["attention", "attention-2heads", "based", "based-2heads"]


@pytest.fixture(scope="module")
def two_heads():
    """Attention with two heads per layer, as cfg.n_heads says too."""
    return tiny("attention", n_heads=2, d_mlp=20, dtype=torch.float64)


def heads_of(model) -> int:
    """cfg.n_heads as TransformerLens reads it."""
    return model.cfg.n_heads


def pair(model, source=5):
    """Clean and corrupted tokens that differ at one place, the clean cache, and a metric."""
    clean = tokens(seed=1)
    corrupted = clean.clone()
    corrupted[:, 2] = source
    _, cache = model.run_with_cache(clean, names_filter=lambda n: not n.endswith("hook_ssm_state"))
    return clean, corrupted, cache, lambda logits: logits[:, -1, 3].mean()


def patched_by_hand(model, corrupted, cache, metric, name, patch):
    """The metric after a patch written out: an independent count of what a tool should find."""

    def hook(value, hook):
        value = value.clone()
        patch(value, cache[name])
        return value

    return metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, hook)]))


@pytest.mark.parametrize("name", MODELS)
def test_patching_by_layer_and_position(name):
    model = tiny(name, dtype=torch.float64)
    _, corrupted, cache, metric = pair(model)
    with torch.no_grad():
        for tool, short in (
            (patching.get_act_patch_resid_pre, "resid_pre"),
            (patching.get_act_patch_attn_out, "attn_out"),
        ):
            got = tool(model, corrupted, cache, metric)
            assert got.shape == (model.cfg.n_layers, LENGTH)
            layer, pos = model.cfg.n_layers - 1, 4
            hook = model.find_hook(f"blocks.{layer}.hook_{short}").name

            def put(value, clean, pos=pos):
                value[:, pos] = clean[:, pos]

            want = patched_by_hand(model, corrupted, cache, metric, hook, put)
            torch.testing.assert_close(got[layer, pos].double(), want, atol=1e-6, rtol=1e-6)


def test_every_block_at_once():
    model = tiny("attention", dtype=torch.float64)
    _, corrupted, cache, metric = pair(model)
    with torch.no_grad():
        got = patching.get_act_patch_block_every(model, corrupted, cache, metric)
    assert got.shape == (3, model.cfg.n_layers, LENGTH) and got.isfinite().all()


@pytest.mark.parametrize("name", WITH_HEADS)
def test_patching_patterns_by_head(name):
    heads = 2 if name.endswith("2heads") else 1
    model = tiny(name, dtype=torch.float64, n_heads=heads)
    _, corrupted, cache, metric = pair(model)
    with torch.no_grad():
        got = patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted, cache, metric)
        assert got.shape == (model.cfg.n_layers, heads)
        layer, head = 1, heads - 1

        def put(value, clean):
            value[:, head] = clean[:, head]

        hook = f"blocks.{layer}.mixer.hook_pattern"
        want = patched_by_hand(model, corrupted, cache, metric, hook, put)
    torch.testing.assert_close(got[layer, head].double(), want, atol=1e-6, rtol=1e-6)
    assert (got.double() - metric(model(corrupted))).abs().max() > 1e-8


def test_every_head_at_once(two_heads):
    _, corrupted, cache, metric = pair(two_heads)
    with torch.no_grad():
        by_head = patching.get_act_patch_attn_head_all_pos_every(
            two_heads, corrupted, cache, metric
        )
        by_pos = patching.get_act_patch_attn_head_by_pos_every(two_heads, corrupted, cache, metric)
    assert by_head.shape == (5, 2, 2) and by_pos.shape == (5, 2, LENGTH, 2)
    assert by_head.isfinite().all() and by_pos.isfinite().all()


def test_patching_states_with_the_generic_tool():
    """The state of one position, for every layer, by TransformerLens' own sweep."""
    model = tiny("mamba", dtype=torch.float64)
    clean, corrupted, _, metric = pair(model)
    _, cache = model.run_with_cache(clean, names_filter=lambda n: n.endswith("hook_ssm_state"))

    def put(value, index, clean_value):
        _, pos = index
        value[:, pos] = clean_value[:, pos]
        return value

    with torch.no_grad():
        got = patching.generic_activation_patch(
            model, corrupted, cache, metric, put, "ssm_state", index_axis_names=("layer", "pos")
        )
    assert got.shape == (2, LENGTH)
    assert (got[0] - got[0, 0]).abs().max() > 1e-6


def test_head_detector_finds_a_previous_token_head():
    """Heads made by hand: positions as queries look one back, through an identity embedding."""
    length = 8
    sizes = {"d_model": 2 * length, "d_vocab": length, "n_ctx": 9, "d_mlp": 0}
    settings = {"n_layers": 1, "n_heads": 2, "options": {"scale": 1.0}}
    cfg = ModelConfig(architecture="attention", **sizes, **settings)
    model = HookedModel(cfg).eval()
    model.token_names = [f"t{i}" for i in range(length)]
    with torch.no_grad():
        for parameter in model.blocks[0].mixer.parameters():
            parameter.zero_()
        model.embed.weight.zero_()
        model.pos_embed.weight.copy_(torch.eye(9, 2 * length))
        mixer = model.blocks[0].mixer
        for t in range(1, length):  # head 0: the query at t points at the key of t - 1
            mixer.q_proj.weight[t - 1, t] = 100.0
        for t in range(length):
            mixer.k_proj.weight[t, t] = 100.0
    text = " ".join(model.token_names)
    scores = detect_head(model, text, "previous_token_head")
    assert scores.shape == (1, 2)
    assert scores[0, 0] > 0.8 > 0.4 > scores[0, 1]
    others = detect_head(model, text, "duplicate_token_head")
    assert others[0, 0] < 0.2


@pytest.mark.parametrize("name", WITH_HEADS)
def test_head_detector_runs_on_a_given_cache(name):
    heads = 2 if name.endswith("2heads") else 1
    model = tiny(name, n_heads=heads)
    ids = torch.arange(LENGTH).repeat(2)[None] % D_VOCAB
    model.token_names = [f"t{i}" for i in range(D_VOCAB)]
    text = " ".join(model.to_str_tokens(ids))
    _, cache = model.run_with_cache(
        ids, names_filter=lambda n: n.endswith("hook_pattern"), remove_batch_dim=True
    )
    for kind in ("induction_head", "previous_token_head", "duplicate_token_head"):
        scores = detect_head(model, text, kind, cache=cache)
        assert scores.shape == (2, heads)
        assert ((scores >= 0) & (scores <= 1)).all() or name.startswith("based")


def direct_parts(model, cache):
    """All parts of the final residual stream: embeddings, mixers' outputs, MLPs' outputs."""
    return cache.decompose_resid(return_labels=True)


@pytest.mark.parametrize("name", MODELS)
def test_decomposition_adds_up_to_the_residual_stream(name):
    model = tiny(name, dtype=torch.float64)
    _, cache = model.run_with_cache(tokens())
    parts, labels = direct_parts(model, cache)
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1], atol=1e-10, rtol=0)
    assert labels[0] == "embed" and len(labels) == len(parts)
    layers, names = cache.accumulated_resid(incl_mid=not model.cfg.attn_only, return_labels=True)
    assert torch.equal(layers[0], cache["resid_pre", 0])
    assert torch.equal(layers[-1], cache["resid_post", -1]) and names[-1] == "final_post"


@pytest.mark.parametrize("name", MODELS)
def test_logit_attributions_add_up_to_the_logit(name):
    model, ids, target = tiny(name, dtype=torch.float64), tokens(), 4
    logits, cache = model.run_with_cache(ids)
    parts, _ = direct_parts(model, cache)
    attributions = cache.logit_attrs(parts, torch.full(ids.shape, target))
    norm_bias = model.ln_final.bias
    constant = 0 if norm_bias is None else (norm_bias @ model.W_U)[target]
    torch.testing.assert_close(
        attributions.sum(0) + constant, logits[..., target], atol=1e-9, rtol=0
    )
    against = cache.logit_attrs(parts, target, incorrect_tokens=7)
    constants = 0 if norm_bias is None else (norm_bias @ model.W_U)[[4, 7]]
    shift = 0 if norm_bias is None else constants[0] - constants[1]
    torch.testing.assert_close(
        against.sum(0) + shift, logits[..., 4] - logits[..., 7], atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", [0, 1, None])
def test_norms_applied_to_a_stack_are_the_models_own(name, layer):
    """apply_ln_to_stack of the whole residual stream is the input of that norm, less its affine."""
    model = tiny(name, dtype=torch.float64)
    _, cache = model.run_with_cache(tokens())
    resid = cache["resid_post", -1] if layer is None else cache["resid_pre", layer]
    norm = model.ln_final if layer is None else model.blocks[layer].ln1
    got = cache.apply_ln_to_stack(resid[None], layer)[0]
    want = norm(resid) if norm.bias is None else norm(resid) - norm.bias
    torch.testing.assert_close(got * norm.weight, want, atol=1e-10, rtol=0)


def test_head_results_add_up(two_heads):
    model = two_heads
    _, cache = model.run_with_cache(tokens())
    stack, labels = cache.stack_head_results(return_labels=True, incl_remainder=True)
    assert labels == ["L0H0", "L0H1", "L1H0", "L1H1", "remainder"]
    torch.testing.assert_close(stack.sum(0), cache["resid_post", -1], atol=1e-10, rtol=0)
    _, hooked = model.run_with_cache(tokens(), names_filter=lambda n: "hook_result" in n)
    torch.testing.assert_close(stack[0], hooked["result", 0][:, :, 0], atol=1e-10, rtol=0)
    cache.compute_head_results()
    torch.testing.assert_close(cache["result", 1], hooked["result", 1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("expand_neurons", [True, False])
@pytest.mark.parametrize("apply_ln", [True, False])
def test_the_full_decomposition_adds_up(two_heads, expand_neurons, apply_ln):
    _, cache = two_heads.run_with_cache(tokens())
    parts, labels = cache.get_full_resid_decomposition(
        expand_neurons=expand_neurons, apply_ln=apply_ln, return_labels=True
    )
    assert len(labels) == len(parts)
    want = cache["resid_post", -1]
    if apply_ln:
        want = cache.apply_ln_to_stack(want[None])[0]
    torch.testing.assert_close(parts.sum(0), want, atol=1e-9, rtol=0)


def test_neuron_results_add_up_to_the_mlps(two_heads):
    _, cache = two_heads.run_with_cache(tokens())
    neurons = cache.get_neuron_results(0)
    bias = two_heads.blocks[0].mlp.fc_out.bias
    torch.testing.assert_close(neurons.sum(-2) + bias, cache["mlp_out", 0], atol=1e-10, rtol=0)


def test_the_residual_stream_through_the_logit_lens():
    model, ids = tiny("mixed", dtype=torch.float64), tokens()
    logits, cache = model.run_with_cache(ids)
    stack = cache.accumulated_resid(apply_ln=True)
    torch.testing.assert_close(stack[-1] @ model.W_U, logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logit_lens_tool(name):
    model, ids = tiny(name, dtype=torch.float64), tokens()
    logits = model(ids)
    result = analysis.logit_lens(model, ids, positions=[2, 6])
    assert result.readout.values.shape == (model.cfg.n_layers + 1, 2, 2, model.cfg.d_vocab)
    torch.testing.assert_close(result.readout.values[-1], logits[:, [2, 6]], atol=1e-9, rtol=0)


def test_collecting_activations():
    model, source = tiny("mamba"), tokens(seed=2)
    name, last = "blocks.1.hook_resid_pre", torch.full((2,), LENGTH - 1)

    def answer(ids):
        return model(ids)[:, -1]

    taken = analysis.collect_activations(model, name, source, answer, positions=last)
    _, cache = model.run_with_cache(source, names_filter=name)
    torch.testing.assert_close(taken, cache[name][:, -1])


def test_it_is_a_hooked_root_module():
    model = tiny("mamba")
    assert isinstance(model, HookedRootModule)
    _, cache = model.run_with_cache(tokens())
    assert isinstance(cache, ActivationCache)
    seen = []
    with model.hooks(
        fwd_hooks=[("hook_embed", partial(lambda value, hook: seen.append(hook.layer)))]
    ):
        pass
    assert model.hook_dict["blocks.1.hook_resid_pre"].layer() == 1
    assert model.mod_dict["blocks.0.mixer"] is model.blocks[0].mixer
