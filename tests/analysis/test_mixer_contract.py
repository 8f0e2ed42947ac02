"""`check_mixer` passes every mixer of ours, and catches a mixer for each law that it breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hooked_ssm.analysis import check_mixer
from hooked_ssm.analysis.mixer_contract import LAWS
from hooked_ssm.errors import ConfigError, ContractError
from hooked_ssm.hook_names import spec
from hooked_ssm.mixers import MIXERS
from hooked_ssm.mixers.based import Based
from hooked_ssm.mixers.mamba import Mamba


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [4, 9])
def test_every_mixer_of_ours_keeps_every_law(name, length):
    table = check_mixer(name, length=length)
    assert table["law"].tolist() == list(LAWS) and table["says"].str.len().min() > 20
    assert table["error"].max() < 1e-5


class Mute(Mamba):
    """Declares a hook that never fires."""

    def hook_specs(self):
        return (*super().hook_specs(), spec("hook_result", "batch pos d_inner"))


class WrongSize(Mamba):
    """Its axes promise one number too many."""

    def axis_sizes(self):
        return {**super().axis_sizes(), "d_inner": self.d_inner + 1}


class Observed(Mamba):
    """Computes something else when somebody looks at its gate."""

    def forward(self, x, segment, carried=None):
        out, carried = super().forward(x, segment, carried)
        return out + float(self.hook_gate.listened), carried


class FarReach(Mamba):
    """Its gate, said to act on its own position, acts on all later ones."""

    def forward(self, x, segment, carried=None):
        before = 0.0 if carried is None else carried.pop("sum")
        out, carried = super().forward(segment.keep_real(x), segment, carried)
        total = before + segment.keep_real(out).cumsum(1)
        return total, {**carried, "sum": total[:, -1:]}


class Prophet(Mamba):
    """Knows the mean of all tokens."""

    def forward(self, x, segment, carried=None):
        out, carried = super().forward(x, segment, carried)
        return out + x.mean(1, keepdim=True), carried


class Forgetful(Mamba):
    """Carries nothing on."""

    def forward(self, x, segment, carried=None):
        return super().forward(x, segment, None)


class Padded(Mamba):
    """Takes padding for tokens."""

    def forward(self, x, segment, carried=None):
        return super().forward(x, replace(segment, real=None), carried)


class Crowd(Mamba):
    """Mixes documents."""

    def forward(self, x, segment, carried=None):
        out, carried = super().forward(x, segment, carried)
        return out + 0.1 * out.mean(0), carried


class Inexact(Based):
    """Says its mixed values hold one more than they do."""

    def pattern_offset(self, activation):
        return 1.0


class Idle(Mamba):
    """Has a parameter that does nothing."""

    def __init__(self, d_model, n_ctx, options):
        super().__init__(d_model, n_ctx, options)
        self.spare = nn.Parameter(torch.zeros(3))


class NotANumber(Mamba):
    """Divides by zero at the last token."""

    def forward(self, x, segment, carried=None):
        out, carried = super().forward(x, segment, carried)
        return out / (segment.length > 1), carried


@pytest.mark.parametrize(
    ("law", "mixer", "where"),
    [
        ("hooks", Mute, "hook_result fired 0 times"),
        ("hooks", WrongSize, r"has shape .*, its axes \[batch pos d_inner\] say"),
        ("looking", Observed, "with a hook on blocks.0.mixer.hook_gate"),
        ("reach", FarReach, r"hook_\w+ at 3 reached later positions"),
        ("causality", Prophet, "tokens from"),
        ("segments", Forgetful, "in parts of"),
        ("segments", NotANumber, "Off by inf: in parts of"),
        ("padding", Padded, "on the left"),
        ("documents", Crowd, "alone"),
        ("pattern", Inexact, "token_mixing"),
        ("gradients", Idle, "the gradient of spare is none"),
    ],
)
def test_each_law_catches_a_mixer_that_breaks_it(monkeypatch, law, mixer, where):
    monkeypatch.setitem(MIXERS, "broken", mixer)
    with pytest.raises(ContractError, match=rf"(?s)breaks \d laws:.*- {law}: .*{where}"):
        check_mixer("broken")


def test_what_is_no_mixer_or_setting_is_refused():
    for wrong in ({"name": "mambo"}, {"length": 3}, {"tolerance": 0}, {"d_stat": 4}):
        with pytest.raises(ConfigError):
            check_mixer(**{"name": "mamba", **wrong})
    assert len(check_mixer("mamba", d_state=1, d_conv=1)) == len(LAWS)
