"""experiments/*.yaml hold the paper's settings: written out here once more, from the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from hooked_ssm.sweeps import read_sweep
from hooked_ssm.tasks import AssociativeRecall, AssociativeTreecall
from hooked_ssm.training import TrainConfig

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ALL = {"attention", "based", "mamba", "hyena", "h3", "base_conv"}
WIDTHS = {16, 32, 64, 128, 256}
RATES = {3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2}
AR = {"num_kv": 8192, "num_pairs": 16, "query_type": "key", "holdout": 0.0, "num_queries": 1}
PCFG = {
    "num_terminals": 20,
    "num_nonterminals": 40,
    "max_rhs_len": 5,
    "max_rules_per_nt": 5,
    "max_depth": 10,
    "terminal_occurrence_factor": None,
    "head_position": "right",
    "query_types": ("parent",),
    "unambiguous_queries": True,
    "sample_first": "target",
    "holdout": 0.0,
    "max_length": 1024,
    "max_tree_depth": 20,
}
LARGE = {**PCFG, "num_terminals": 8192, "terminal_occurrence_factor": 20.0}
# file -> (task, its fields, steps, architectures, layers)
PAPER = {
    "ar_32": (AssociativeRecall, AR, 50016, ALL, {2}),
    "ar_32_reversed": (AssociativeRecall, {**AR, "query_type": "value"}, 50016, ALL, {2}),
    "ar_32_layers": (AssociativeRecall, AR, 50016, ALL, {1, 3}),
    "ar_gen": (AssociativeRecall, {**AR, "holdout": 0.2}, 50016, ALL, {2}),
    "ar_mamba_conv": (AssociativeRecall, AR, 50016, {"mamba"}, {2}),
    "ar_based_conv": (AssociativeRecall, AR, 50016, {"based"}, {2}),
    "pcfg_easy": (AssociativeTreecall, PCFG, 100032, ALL, {2}),
    "pcfg_easy_8192": (AssociativeTreecall, LARGE, 100032, ALL, {2}),
    "pcfg_medium": (AssociativeTreecall, {**PCFG, "max_rhs_len": 10}, 100032, ALL, {2}),
    "pcfg_gen": (AssociativeTreecall, {**PCFG, "holdout": 0.2}, 100032, ALL, {2}),
    "sibling": (AssociativeTreecall, {**PCFG, "query_types": ("sibling",)}, 100032, ALL, {2}),
}
VARIANTS = {
    "ar_mamba_conv": {0, 1, 2, 3, 4},
    "ar_based_conv": {1, 2, 3, 4, "long"},
}


@pytest.mark.parametrize("name", PAPER)
def test_a_full_sweep_is_the_papers(name):
    kind, fields, steps, architectures, layers = PAPER[name]
    specs = read_sweep(EXPERIMENTS / f"{name}.yaml")
    assert {spec.model["architecture"] for spec in specs} == architectures
    assert {spec.model["n_layers"] for spec in specs} == layers
    assert {spec.model["d_model"] for spec in specs} == WIDTHS
    assert {spec.train["lr"] for spec in specs} == RATES
    for task in {spec.build_task() for spec in specs}:
        assert type(task) is kind
        assert {field: getattr(task, field) for field in fields} == fields
    for spec in specs:
        assert spec.build_train_task() == spec.build_task()
        assert spec.model["n_ctx"] == 1024
        config = spec.train_config("unused")
        assert (config.steps, config.batch_size) == (steps, 32)
        assert (config.data, config.train_set_size) == ("fixed", 100032)
        assert config.eval_size == spec.evaluate["documents"] == 320


def test_training_is_the_papers_unless_told_otherwise():
    config = TrainConfig(steps=1, batch_size=1, lr=1e-3, seed=0)
    assert (config.schedule, config.warmup, config.weight_decay) == ("cosine", 0.1, 0.0)
    assert config.loss == "answer"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_convolutions_are_ablated_at_the_papers_widths(name):
    specs = read_sweep(EXPERIMENTS / f"{name}.yaml")
    assert len(specs) == 5 * len(WIDTHS) * len(RATES)
    option = "d_conv" if name == "ar_mamba_conv" else "kernel_size"
    assert {spec.model["options"][option] for spec in specs} == VARIANTS[name]


def test_every_experiment_is_held_to_the_paper_here():
    files = {path.stem for path in EXPERIMENTS.glob("*.yaml")}
    assert files == {*PAPER, "reproduction"}


def test_the_reproduction_is_a_part_of_the_papers_sweeps():
    specs = read_sweep(EXPERIMENTS / "reproduction.yaml")
    for name in ("ar_32", "pcfg_easy", "ar_mamba_conv"):
        paper = {
            (s.model["architecture"], s.model["d_model"], s.train["lr"], s.train["steps"])
            for s in read_sweep(EXPERIMENTS / f"{name}.yaml")
        }
        of_name = [
            s for s in specs
            if (s.variant != "") == (name == "ar_mamba_conv")
            and s.task_name == ("pcfg_easy" if name == "pcfg_easy" else "ar_32")
        ]  # fmt: skip
        assert of_name
        for s in of_name:
            key = (s.model["architecture"], s.model["d_model"], s.train["lr"], s.train["steps"])
            assert key in paper
