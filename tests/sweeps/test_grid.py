"""From files to runs, and the names of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps import RunSpec, parse_sweep, read_sweep
from hooked_ssm.sweeps import spec as spec_module
from tests.sweeps.tiny import SWEEP, one_run, tiny_sweep

pytestmark = pytest.mark.usefixtures("as_shipped")

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))


def test_a_grid_is_the_product_of_its_axes():
    specs = tiny_sweep()
    assert len({spec.key for spec in specs}) == len(specs) == 3 * 2 * 2
    cells = {
        (spec.model["architecture"], spec.model["n_layers"], spec.train["lr"]) for spec in specs
    }
    assert ("mamba", 2, 0.01) in cells and len(cells) == 12
    assert specs[0].label == "attention d8 l1 lr 0.001 seed 0, tiny"


def test_the_key_is_stable():
    # another key would make every sweep train again: change FORMAT only with a reason
    assert one_run().key == "09dfda28b1b1e80a"
    spec = one_run()
    shuffled = json.loads(json.dumps(spec.to_json(), sort_keys=True))
    assert RunSpec.from_json(shuffled).key == spec.key
    renamed = RunSpec.from_json({**spec.to_json(), "task_name": "other", "variant": "v"})
    assert renamed.key == spec.key
    for changes in ({"steps": 3}, {"loss": "all"}):
        assert one_run(**changes).key != spec.key


def test_the_key_leaves_out_what_changes_no_trained_model():
    spec = one_run()
    for changes in ({"checkpoint_every": 7}, {"keep_checkpoints": "all"}):
        assert one_run(**changes).key == spec.key
    for evaluate in ({}, {"documents": 9}, {"directions": ["restore", "corrupt"]}):
        assert RunSpec.from_json({**spec.to_json(), "evaluate": evaluate}).key == spec.key


def test_yaml_and_json_give_the_same_runs(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(SWEEP))
    (tmp_path / "a.yaml").write_text(
        """
        tasks: {tiny: {task: associative_recall, num_kv: 12, num_pairs: 2}}
        grid:
          architecture: [attention, mamba, base_conv]
          d_model: 8
          n_layers: [1, 2]
          lr: [1e-3, 1.e-2]
          task: tiny
        train: {steps: 2, batch_size: 4, eval_size: 8, log_every: 1}
        evaluate: {documents: 8, sites: [resid_pre]}
        """
    )
    from_json, from_yaml = (read_sweep(tmp_path / name) for name in ("a.json", "a.yaml"))
    assert from_json == from_yaml == tiny_sweep()


def test_variants_grids_and_small_versions_are_merged():
    content = {
        **SWEEP,
        "variants": {"conv 2": {"model": {"options": {"d_conv": 2}}, "train": {"steps": 9}}},
        "grid": [
            {**SWEEP["grid"], "architecture": "mamba", "n_layers": 1, "variant": ["", "conv 2"]},
            {**SWEEP["grid"], "architecture": "based", "train": {"steps": 5}},
        ],
        "small": {"train": {"batch_size": 2}},
    }
    specs = parse_sweep(content)
    assert [spec.train["steps"] for spec in specs] == [2, 9, 2, 9, 5, 5, 5, 5]
    assert [spec.variant for spec in specs[:4]] == ["", "conv 2", "", "conv 2"]
    assert specs[1].model_config().mixer_options(0).d_conv == 2
    small = parse_sweep(content, small=True)
    assert {spec.train["batch_size"] for spec in small} == {2}
    assert len(small) == len(specs)


@pytest.mark.parametrize(
    ("section", "name"),
    [("model", name) for name in ("architecture", "d_model", "n_layers", "seed", "device")]
    + [("train", name) for name in ("lr", "seed", "device")]
    + [("train_task", "task"), ("evaluate", "lr")],
)
def test_axes_and_devices_stand_in_no_section(section, name):
    content = {**SWEEP, "variants": {"v": {section: {name: 1}}}}
    grid = SWEEP["grid"]
    for place, wrong in (
        ("", {**SWEEP, section: {**SWEEP.get(section, {}), name: 1}}),
        ("grid: ", {**SWEEP, "grid": {**grid, section: {name: 1}}}),
        ("variants: v: ", {**content, "grid": {**grid, "variant": "v"}}),
        ("small: ", {**SWEEP, "small": {section: {name: 1}}}),
    ):
        remedy = "(on the grid|to the sweep)"
        with pytest.raises(ConfigError, match=f"^{place}{section}: {name}=1 .*{remedy}"):
            parse_sweep(wrong)


def test_options_are_merged_setting_by_setting():
    grid = {**SWEEP["grid"], "architecture": "mamba", "n_layers": 1, "lr": 0.1, "variant": "v"}
    content = {
        **SWEEP,
        "variants": {"v": {"model": {"options": {"d_state": 5}}}},
        "grid": {**grid, "model": {"options": {"d_conv": 3, "d_state": 4}}},
        "model": {"options": {"expand": 1, "d_conv": 2}},
        "small": {"model": {"options": {"expand": 3}}},
    }
    (spec,), (small,) = parse_sweep(content), parse_sweep(content, small=True)
    assert spec.model["options"] == {"expand": 1, "d_conv": 3, "d_state": 5}
    assert small.model["options"] == {"expand": 3, "d_conv": 3, "d_state": 5}
    (plain,) = parse_sweep({**content, "grid": {**grid, "model": {"options": None}}})
    assert plain.model["options"] == {"d_state": 5}


def test_training_documents_may_ask_more_often():
    (spec,) = parse_sweep(
        {
            **SWEEP,
            "grid": {**SWEEP["grid"], "architecture": "mamba", "n_layers": 1, "lr": 0.1},
            "train_task": {"num_queries": 2},
        }
    )
    assert spec.build_train_task().num_queries == 2
    assert spec.build_task().num_queries == 1
    assert spec.model_config().n_ctx == spec.build_train_task().max_length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gird": {}}, "unknown entry of a sweep 'gird'; did you mean 'grid'"),
        ({"grid": {**SWEEP["grid"], "task": "ar_23"}}, "unknown task 'ar_23'; did you mean"),
        ({"grid": {**SWEEP["grid"], "architecture": "mambo"}}, "mambo d8.*did you mean 'mamba'"),
        ({"grid": {**SWEEP["grid"], "lr": "fast"}}, "lr='fast'"),
        ({"grid": {**SWEEP["grid"], "lr": []}}, "empty list"),
        ({"grid": {**SWEEP["grid"], "variant": "x"}}, "unknown variant 'x'. Allowed: nothing"),
        ({"grid": {**SWEEP["grid"], "task": None}}, "task=None.*give a name"),
        ({"variants": {"as is": {}}}, "'as is', by which tables and figures call the run without"),
        ({"tasks": {"\ud800": {}}}, "which no file can hold"),
        ({"train": {}}, "TrainConfig needs steps, batch_size; got lr, seed"),
        ({"grid": {"task": "tiny"}}, "needs architecture, d_model, n_layers, lr"),
        ({"grid": None}, "grid must be a mapping"),
        ({"train": {**SWEEP["train"], "step": 1}}, "unknown TrainConfig field 'step'"),
        ({"train": {**SWEEP["train"], "folder": "x"}}, "folder is no part of a run"),
        ({"evaluate": {"documents": 0}}, "documents=0"),
        ({"evaluate": {"document": 1}}, "unknown evaluate field 'document'"),
        ({"evaluate": {"split": "dev"}}, "eval_split='dev' is evaluate's.*judged by. Allowed"),
        ({"train": {**SWEEP["train"], "eval_split": "test"}}, "eval_split='test' is evaluate's"),
        ({"train_task": {"num_kv": 20}}, "train_task: its vocabulary of 23.*'k6'.*'v0'"),
        ({"train_task": {"holdout": 0.1}}, "train_task: holdout=0.1, but the task's is 0.0"),
        ({"train_task": {"seed": 1}}, "train_task: seed=1, but the task's is 0.*Leave it out"),
        ({"model": {"d_conf": 1}}, "unknown config field 'd_conf'"),
        ({"evaluate": {"directions": ["restor"]}}, "directions=.*'restor'.*mean 'restore'"),
        ({"evaluate": {"directions": ["corrupt"]}}, "directions=.*allowed.*'restore'"),
        ({"evaluate": {"sites": ["resid_pre", "ressid"]}}, "sites=.*'ressid'"),
        ({"evaluate": {"sites": ["ssm_dt"]}}, "attention d8.*sites=.*ssm_dt"),
        ({"model": {"n_ctx": 4}}, "n_ctx=4, but documents.*need 9.*Leave n_ctx out"),
        ({"model": {"d_vocab": 14}}, "d_vocab=14, but documents.*need 15"),
        ({"model": {"n_ctx": 9}, "train_task": {"num_queries": 2}}, "n_ctx=9.*need 11"),
        ({"model": {"n_heads": 3}}, "n_heads=3"),
        (
            {"tasks": {"tiny": {"task": "associative_recall", "num_kv": 8, "num_pairs": 4}}},
            "'test' cannot be corrupted at query_item_orig: no token is left to put in",
        ),
        (
            {"variants": {"a": {}}, "grid": {**SWEEP["grid"], "variant": ["", "a"]}},
            "the same run under two names",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_sweep({**SWEEP, **changes})


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            {},
            {"train": {"steps": 5}},
            "'attention d8 l1 lr 0.001 seed 0, tiny' of grid 1 .* of grid 2 differ in more "
            r"than .*, with train.steps 2 and 5; .*variant.*another name",
        ),
        (
            {"model": {"d_mlp": 8}},
            {"model": {"d_mlp": 9, "options": {"d_head": 4}}},
            "with model.d_mlp 8 and 9, model.options None and {'d_head': 4}",
        ),
        ({}, {"seed": 1, "train": {"steps": 5}}, "more than learning rate and seed.*steps 2 and 5"),
        (
            {},
            {"lr": 1e-4, "evaluate": {"documents": 9}},
            "seed, with evaluate.documents 8",
        ),
        ({}, {"evaluate": {"documents": 9}}, "trained alike, with evaluate.documents 8 and 9"),
        ({}, {"train": {"checkpoint_every": 9}}, "alike, with train.checkpoint_every None and 9"),
    ],
)
def test_two_runs_of_one_name_are_refused(one, other, message):
    grid = {**SWEEP["grid"], "architecture": "attention"}
    with pytest.raises(ConfigError, match=message):
        parse_sweep({**SWEEP, "grid": [{**grid, **one}, {**grid, **other}]})


def test_a_stack_of_ones_own_has_the_name_of_its_mixers():
    grid = {**SWEEP["grid"], "architecture": None, "n_layers": [None, 2]}
    stack = {"mixers": ["mamba", {"mixer": "attention", "d_head": 4}]}
    content = {**SWEEP, "model": stack, "grid": {**grid, "lr": 1e-3}}
    with pytest.raises(ConfigError, match="n_layers None and 2"):  # one model, written twice
        parse_sweep(content)
    (spec,) = parse_sweep({**content, "grid": {**content["grid"], "n_layers": None}})
    assert (spec.architecture, spec.n_layers) == ("mamba+attention", 2)
    assert spec.label == "mamba+attention d8 l2 lr 0.001 seed 0, tiny"
    with pytest.raises(ConfigError, match="None d8 l1.*architecture"):
        parse_sweep({**SWEEP, "grid": {**grid, "n_layers": 1}})


@pytest.mark.parametrize("name", ["max_rhs_len", "num_nonterminals", "max_depth"])
def test_training_documents_are_of_the_tasks_grammar(name):
    tree = {"task": "associative_treecall", "num_nonterminals": 8, "max_depth": 4}
    content = {**SWEEP, "tasks": {"tiny": tree}, "train_task": {name: 6}}
    with pytest.raises(ConfigError, match=f"train_task: {name}=6, but the task's is"):
        parse_sweep(content)


def test_runs_that_recur_are_there_once():
    assert parse_sweep({**SWEEP, "grid": [SWEEP["grid"], SWEEP["grid"]]}) == tiny_sweep()


def test_hundreds_of_runs_are_checked_in_seconds(monkeypatch):
    built = []
    monkeypatch.setattr(spec_module, "HookedModel", lambda cfg, **_: built.append(cfg))
    grid = {**SWEEP["grid"], "lr": [i / 1000 for i in range(1, 11)], "seed": list(range(7))}
    specs = parse_sweep({**SWEEP, "grid": {**grid, "d_model": 24}, "evaluate": {}})
    assert len(specs) == 420
    assert len(built) == 6  # architectures and layers: neither rates nor seeds make other models


def test_training_documents_are_of_the_task():
    train_task = {"task": "multi_query_associative_recall"}
    spec = RunSpec.from_json({**one_run().to_json(), "train_task": train_task})
    with pytest.raises(ConfigError, match="task='multi_query_.*', but the task's is 'associative_"):
        spec.check()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the sweep .*missing.yaml"):
        read_sweep(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("grid: [")
    with pytest.raises(ConfigError, match="cannot read the sweep .*bad.yaml"):
        read_sweep(tmp_path / "bad.yaml")
    (tmp_path / "no_small.yaml").write_text(json.dumps(SWEEP))
    with pytest.raises(ConfigError, match="no_small.yaml: .*no small version"):
        read_sweep(tmp_path / "no_small.yaml", small=True)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_and_its_small_version_can_be_built(path):
    full, small = read_sweep(path), read_sweep(path, small=True)
    assert len(full) >= len(small) >= 2
    assert sum(s.train["steps"] for s in small) < sum(s.train["steps"] for s in full) / 10
