"""Linear probes: what is certainly there is found, what certainly is not is not."""

from __future__ import annotations

import pytest

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.probing import linear_probes
from hooked_ssm.errors import ConfigError, HookNameError, TaskError
from hooked_ssm.tasks import AssociativeRecall

TASK = AssociativeRecall(num_kv=8, num_pairs=3)


def tiny(architecture: str) -> HookedModel:
    cfg = ModelConfig(
        architecture=architecture, d_model=8, n_layers=2, d_vocab=TASK.d_vocab, n_ctx=16,
        init="uniform",
    )  # fmt: skip
    return HookedModel(cfg)


def test_embeddings_hold_their_own_token_only() -> None:
    probes = linear_probes(
        tiny("mamba"), TASK, ["resid_pre"], layers=[0], n=200, targets=("key", "value", "answer")
    )
    frame = probes.frame.set_index(["position", "target"])
    assert frame.loc[("query_item_orig", "key"), "selectivity"] > 0.6
    assert frame.loc[("target_item_orig", "value"), "accuracy"] > 0.99
    assert frame.loc[("query_item", "key"), "accuracy"] > 0.99
    assert abs(frame.loc[("divider", "key"), "selectivity"]) < 0.1
    assert abs(frame.loc[("query_item_orig", "answer"), "selectivity"]) < 0.15
    assert frame["majority"].between(0.25, 0.4).all()


@pytest.mark.parametrize("architecture", ["mamba", "h3"])
def test_carried_states_can_be_probed(architecture: str) -> None:
    probes = linear_probes(
        tiny(architecture), TASK, ["carry", "mixed"], layers=[1], n=60, folds=3,
        positions=("target_item_orig", "query_item"), targets=("value",),
    )  # fmt: skip
    here = probes.frame.set_index(["site", "position"])
    assert here.loc[("carry", "target_item_orig"), "selectivity"] > 0.2
    assert here.loc[("carry", "query_item"), "features"] > 8
    table = probes.table("value")
    assert list(table.index) == [(1, "carry"), (1, "mixed")]
    assert len(probes.plot("value").data) == 1
    assert "Linear probes" in probes._repr_html_()


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, second = (
        linear_probes(tiny("attention"), TASK, ["mixed"], n=40, folds=2).frame for _ in range(2)
    )
    assert first.equals(second)


def test_refuses_what_makes_no_sense(as_shipped: None) -> None:
    model = tiny("attention")
    with pytest.raises(TaskError, match="unknown target 'keys'; did you mean 'key'"):
        linear_probes(model, TASK, targets=("keys",))
    with pytest.raises(TaskError, match="unknown position 'query'"):
        linear_probes(model, TASK, positions=("query",))
    with pytest.raises(TaskError, match="4 documents are too few for 5 folds"):
        linear_probes(model, TASK, n=4)
    with pytest.raises(HookNameError, match="Attention has no state"):
        linear_probes(model, TASK, ["state"])
    with pytest.raises(ConfigError, match="unknown target 'value'"):
        linear_probes(model, TASK, n=20, folds=2).table("value")
