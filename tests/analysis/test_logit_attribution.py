"""Logit attribution adds up to the logit, part by part; the lens ends at the model's output."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.analysis.logit_attribution import logit_attribution, logit_lens
from hooked_ssm.errors import HookNameError, ShapeError
from hooked_ssm.mixers import MIXERS
from tests.models import tiny, tokens

STACKS = [*MIXERS, "mixed"]
ANSWERS, WRONG, READ = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.tensor([6, 3, 5])


@torch.no_grad()
@pytest.mark.parametrize("name", STACKS)
def test_parts_add_up_to_the_logit(name: str) -> None:
    model, ids = tiny(name, dtype=torch.float64), tokens(3)
    logits = model(ids)[torch.arange(3), READ]
    want = logits.gather(1, ANSWERS[:, None])[:, 0]
    plain = logit_attribution(model, ids, ANSWERS, read_at=READ)
    torch.testing.assert_close(plain.values.sum(0) + plain.bias, want, atol=1e-10, rtol=0)
    want = want - logits.gather(1, WRONG[:, None])[:, 0]
    split = logit_attribution(model, ids, ANSWERS, WRONG, split="mixed", read_at=READ)
    torch.testing.assert_close(split.values.sum(0) + split.bias, want, atol=1e-10, rtol=0)
    assert len(split.parts) == len(plain.parts) + len(model.blocks)


@torch.no_grad()
def test_scan_and_skip_of_mamba() -> None:
    """What is beside the scan is the skip D x, gated: without D there is nothing of it."""
    model, ids = tiny("mamba", dtype=torch.float64), tokens(3)
    split = logit_attribution(model, ids, ANSWERS, split="mixed")
    assert max(split.curvature.values()) < 1e-10  # the output is affine in the scan's
    name = model.hook_name(1, "gated")
    _, cache = model.run_with_cache(ids, names_filter=[name, *(model.hook_name(1, w) for w in
                                                               ("y", "y_skip"))])  # fmt: skip
    share = cache[name] * cache["y", 1] / cache["y_skip", 1]
    through = model.blocks[1].mixer.out_proj(share)[:, -1]
    _, scale = model.run_with_cache(ids, names_filter="ln_final.hook_scale")
    through = through - through.mean(-1, keepdim=True)
    along = model.tokens_to_residual_directions(ANSWERS)
    want = (through / scale["ln_final.hook_scale"][:, -1] * along).sum(-1)
    got = split.values[split.parts.index("mixer 1 through mixed")]
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    model.blocks[1].mixer.D.zero_()
    nothing = logit_attribution(model, ids, ANSWERS, split="mixed")
    assert nothing.values[nothing.parts.index("mixer 1 beside mixed")].abs().max() < 1e-12
    assert nothing.frame["part"].tolist() == nothing.parts


@torch.no_grad()
def test_convolution_of_base_conv_and_its_own_input() -> None:
    model, ids = tiny("base_conv", dtype=torch.float64), tokens(3)
    split = logit_attribution(model, ids, ANSWERS, split="conv", read_at=READ)
    _, cache = model.run_with_cache(ids, names_filter="blocks.0.hook_mixer_in")
    rest = cache["blocks.0.hook_mixer_in"]
    plain = logit_attribution(model, ids, ANSWERS, read_at=READ)
    assert max(split.curvature.values()) < 1e-10
    assert not torch.equal(rest, torch.zeros_like(rest))
    both = split.values[split.parts.index("mixer 0 through conv")]
    both = both + split.values[split.parts.index("mixer 0 beside conv")]
    torch.testing.assert_close(both, plain.values[plain.parts.index("mixer 0")])


@torch.no_grad()
def test_a_norm_after_the_scan_is_said_to_bend() -> None:
    split = logit_attribution(tiny("gla"), tokens(3), ANSWERS, split="mixed")
    assert min(split.curvature.values()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", STACKS)
def test_the_lens_ends_at_the_output(name: str) -> None:
    model, ids = tiny(name, dtype=torch.float64), tokens(3)
    lens = logit_lens(model, ids, read_at=READ)
    assert lens.shape[0] == len(model.blocks) + 1
    torch.testing.assert_close(lens[-1], model(ids)[torch.arange(3), READ], atol=1e-10, rtol=0)
    first = model.logits_at(model.ln_final(model(ids, stop_at_layer=0)))[torch.arange(3), READ]
    torch.testing.assert_close(lens[0], first, atol=1e-10, rtol=0)


@pytest.mark.usefixtures("as_shipped")
def test_refusals() -> None:
    model = tiny("attention")
    with pytest.raises(ShapeError, match="answers is .* but it is 2 in tokens"):
        logit_attribution(model, tokens(), ANSWERS)
    with pytest.raises(HookNameError, match="no conv"):
        logit_attribution(model, tokens(), ANSWERS[:2], split="conv")
    with pytest.raises(HookNameError, match="outside the mixers"):
        logit_attribution(model, tokens(), ANSWERS[:2], split="resid_pre")
