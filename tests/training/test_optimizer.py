from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hooked_ssm.errors import ConfigError
from hooked_ssm.training import learning_rate, split_by_decay
from hooked_ssm.training.optimizer import build_optimizer, optimizer_names
from tests.training.tiny import tiny_config, tiny_model


def test_cosine_by_hand():
    config = tiny_config(steps=10, lr=1.0, warmup=0.2)
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]  # two warm-up steps, then the cosine starts at its top
    assert rates[6] == pytest.approx(0.5)  # halfway from step 2 to step 10
    assert rates[9] == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)
    assert rates[9] > 0


def test_linear_and_constant_by_hand():
    linear = tiny_config(steps=10, lr=1.0, warmup=0.2, schedule="linear")
    assert [learning_rate(s, linear) for s in (0, 1, 2, 4, 6)] == [0.5, 1.0, 1.0, 0.75, 0.5]
    constant = tiny_config(steps=10, lr=1.0, warmup=0.2, schedule="constant")
    assert [learning_rate(s, constant) for s in (0, 1, 5, 9)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_rates_lie_between_zero_and_the_peak(schedule, warmup, steps):
    config = tiny_config(steps=steps, lr=0.3, warmup=warmup, schedule=schedule)
    rates = [learning_rate(step, config) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    assert max(rates) == 0.3


class Parts(nn.Module):
    """One parameter of each kind the rules tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.unembed = nn.Linear(4, 5)
        self.unembed.weight = self.embed.weight  # tied
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.A_log = nn.Parameter(torch.zeros(4, 4))
        self.A_log._no_weight_decay = True
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_only_matrices_decay():
    decayed, kept = split_by_decay(Parts())
    assert list(decayed) == ["linear.weight"]
    assert set(kept) == {
        "A_log",
        "embed.weight",
        "unembed.bias",
        "norm.weight",
        "norm.bias",
        "linear.bias",
    }


def test_groups_of_the_optimizer():
    model = Parts()
    optimizer = build_optimizer(model, tiny_config(weight_decay=0.1, betas=(0.8, 0.95)))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    by_name = dict(model.named_parameters())
    assert all(a is by_name[n] for a, n in zip(listed, optimizer_names(model), strict=True))


def test_mamba_keeps_its_dynamics_undecayed():
    decayed, kept = split_by_decay(tiny_model())
    assert any(name.endswith("A_log") for name in kept)
    assert any("embed" in name for name in kept)
    assert all(parameter.ndim >= 2 for parameter in decayed.values())
    assert any("mixer" in name for name in decayed)


def test_a_frozen_model_is_refused():
    model = Parts().requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(model, tiny_config())
