"""Every public analysis refuses what it cannot use, by name and before anything runs."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch

from hooked_ssm import analysis
from hooked_ssm.analysis import ablation, metrics
from hooked_ssm.errors import ConfigError, HookedSSMError, HookNameError, ShapeError, TaskError
from hooked_ssm.tasks import AssociativeRecall, TaskBatch
from tests.analysis.test_patching import difference, pair
from tests.models import D_VOCAB, tiny

pytestmark = pytest.mark.usefixtures("as_shipped")

NAN = float("nan")
MODEL = tiny("attention-2heads")
CLEAN, CORRUPTED = pair()
TASK = AssociativeRecall(num_kv=12, num_pairs=2)
ANSWERS = torch.tensor([1, 2, 3])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


BATCH = TASK.sample(4, generator=generator())
PATCHING = [
    analysis.activation_patching,
    analysis.attribution_patching,
    analysis.path_patching,
    analysis.edge_attribution,
]
SWEEPS = PATCHING[:2]
ON_TASKS = [
    analysis.mechanistic_evaluation,
    analysis.mechanism_report,
    partial(analysis.linear_probes, folds=2),
]
MIXING = analysis.token_mixing(MODEL, CLEAN, 0)
SCORES = analysis.induction_scores(MODEL, CLEAN)
PATCHED = analysis.activation_patching(MODEL, CLEAN, CORRUPTED, difference())
PAIR = {"model": MODEL, "clean": CLEAN, "corrupted": CORRUPTED, "metric": difference()}
ON_TASK = {"model": MODEL, "task": TASK, "n": 4}
TOKENS = {"model": MODEL, "tokens": CLEAN}
SCORED = {"model": MODEL, "documents": CLEAN}

TABLE = [
    (PATCHING, PAIR, {
        "model": [None, "mamba"],
        "clean": [CLEAN[0], CLEAN.float(), CLEAN[:, :-1], CLEAN[:2], CLEAN[:0], CLEAN.tolist()],
        "corrupted": [None, CORRUPTED[None], CORRUPTED.int(), CORRUPTED.to("meta")],
        "metric": ["logit_difference", None, {}, {"a": 1}],
        "read_at": [3, [1, 2, 3], torch.tensor([1, 2]), torch.tensor([0, 1, 99]), ANSWERS - 2.0],
        "attention_mask": [torch.full(CLEAN.shape, -1e9), torch.ones(3, 4), [[True]]],
    }),
    (SWEEPS, PAIR, {
        "sites": ["resid_pre", [], ["resid_pry"], [3], None],
        "layers": [1, [], [99], [-3], [0.5], ["0"], [True], [0, 99]],
        "positions": [ANSWERS, torch.tensor(3), [1.5], [], 3, [99], "al", ["a"], {}, {"key": [1]},
                      {"key": ANSWERS[:2]}, {"key": torch.tensor([0, 1, 99])},
                      {"key": ANSWERS.double()}],
        "heads": [[], [2], [-1], [0.5], 1, "al"],
        "direction": ["denoize", None, 1],
    }),
    (PATCHING[:1] + PATCHING[2:3], PAIR, {
        "max_batch": [0, -1, 1.5, "8", True, None],
        "progress": [1, "yes"],
    }),
    (PATCHING[1:2] + PATCHING[3:], PAIR, {"steps": [0, -1, 1.5, True, "2"]}),
    ([analysis.path_patching], PAIR, {
        "edges": [[], ["embed"], [("embed", "logits")], [(("embed",), ("logit",))],
                  [(("mixer_out", 0, 1), ("logits",))], [(("result", 0, 2), ("logits",))], 3,
                  [(("mixer_out", 99), ("logits",))], [(("mixer_out", "0"), ("logits",))]],
    }),
    (ON_TASKS, ON_TASK, {
        "task": [None, "ar"],
        "n": [0, True, "8", 2.5],
        "split": ["tests", None],
        "batch": [BATCH.tokens, BATCH[:0],
                  TaskBatch(**{**vars(BATCH), "positions": {"bos": BATCH.lengths}})],
        "progress": [1],
    }),
    (ON_TASKS[:2], ON_TASK, {"generator": [0, "seed"], "max_batch": [0, True, "8"]}),
    ([analysis.mechanistic_evaluation], ON_TASK, {
        "layers": [1, [], [99], [0.5], [0, 99]],
        "sites": ["resid_pre", [], ["resid_pry"], [3]],
        "corruptions": [[], ["key"], "query_item_orig"],
        "positions": [[], ["key"], "divider", 3],
        "directions": [[], ["restor"], "restore", ["corrupt"]],
    }),
    ([analysis.mechanism_report], ON_TASK, {"controls": [0, True, "2"]}),
    ([analysis.linear_probes], ON_TASK, {
        "layers": [1, [], [99]],
        "sites": ["resid_pre", [], ["resid_pry"]],
        "positions": ["divider", [], ["key"]],
        "targets": ["key", [], ["keys"]],
        "folds": [1, 0, True, "5"],
        "C": [0, NAN, "1"],
        "max_iter": [0],
        "seed": [-1, "0"],
    }),
    ([analysis.induction_scores, analysis.previous_token_scores,
      analysis.duplicate_token_scores], SCORED, {
        "model": [None],
        "documents": [CLEAN[0], CLEAN.float(), BATCH[:0], [1, 2], CLEAN[:0]],
        "layers": [1, [], [99], [-3]],
        "queries": ["every", torch.ones(3, 4, dtype=torch.bool), 3],
        "groups": [0, True],
        "measure": ["mult"],
        "causal": [1],
        "controls": [0],
        "n": [0],
        "generator": [0],
        "progress": [1],
    }),
    ([partial(analysis.token_mixing, layer=0)], TOKENS, {
        "layer": [2, -3, "0", 0.0, None, True],
        "through": ["value"],
    }),
    ([partial(analysis.token_mixing, layer=0), analysis.loss_per_position, analysis.logit_lens,
      partial(analysis.in_context_learning_score, early=1, late=5),
      partial(analysis.logit_attribution, answers=ANSWERS)], TOKENS, {
        "tokens": [CLEAN[0], CLEAN.float(), CLEAN[:0], "a b", CLEAN + D_VOCAB],
        "attention_mask": [torch.full(CLEAN.shape, -1e9), torch.ones(3, 4)],
    }),
    ([analysis.in_context_learning_score], TOKENS, {
        "early": [-1, 99, "1", slice(5, 5), slice("a", 3), slice(0, 3, 0)], "late": [500, 1.5],
    }),
    ([partial(analysis.logit_attribution, answers=ANSWERS)], TOKENS, {
        "answers": [ANSWERS[:2], ANSWERS + D_VOCAB, -ANSWERS, ANSWERS.float(), [1, 2, 3]],
        "wrong": [ANSWERS[:2], ANSWERS + D_VOCAB],
        "split": [3, "mixd"],
        "read_at": [3, torch.tensor([0, 1, 99])],
    }),
    ([metrics.logit_difference], {"answers": ANSWERS, "wrong": ANSWERS}, {
        "answers": [[1], ANSWERS.float(), -ANSWERS, ANSWERS[:0], ANSWERS[:2]],
        "wrong": [ANSWERS.float(), -ANSWERS, ANSWERS[:2], None],
    }),
    ([metrics.probability, metrics.log_probability, metrics.rank, metrics.accuracy], {}, {
        "answers": [[1], ANSWERS.float(), -ANSWERS, ANSWERS[:0], ANSWERS[None]],
    }),
    ([metrics.kl], {}, {"reference": [ANSWERS, torch.zeros(3), None]}),
    ([ablation.zero, partial(ablation.noise, 1.0, generator()),
      partial(ablation.resample, generator())], {}, {
        "positions": [1, [], [0.5], "all"], "heads": [1, [], [0.5]],
    }),
    ([ablation.noise], {"scale": 1.0, "generator": generator()}, {
        "scale": [-1, NAN, "1"], "generator": [0, None],
    }),
    ([ablation.mean], {}, {"over": ["batch", [], [0]], "reference": [[1.0]]}),
    ([analysis.detection_pattern], {"tokens": CLEAN, "kind": "induction"}, {
        "kind": ["inducton", None], "tokens": [CLEAN[0], CLEAN.float()],
    }),
    ([MIXING.plot], {}, {"document": [3, -4, "0", None], "units": [[2], [-3], 0, [], ["0"]]}),
    ([SCORES.best], {}, {"layer": [2, -1, "0"], "unit": ["heads", 0]}),
    ([PATCHED.heatmap], {}, {
        "metric": ["probability", 0], "show": ["recover", None], "tokens": [3, "abc", ["a"]],
    }),
    ([TASK.build], {"keys": BATCH.tokens[:, 1:5:2], "values": BATCH.tokens[:, 2:5:2],
                    "query": torch.zeros(4, dtype=torch.long)}, {
        "keys": [BATCH.tokens[:, 2:5:2], BATCH.tokens[:, 1:2], [[3, 4]]],
        "values": [BATCH.tokens[:, 1:5:2], BATCH.tokens[:, 1:5:2].float()],
        "query": [0, torch.full((4,), 2), torch.full((4,), -1), torch.zeros(3, dtype=torch.long)],
    }),
    ([partial(analysis.find_site, MODEL)], {"layer": 0, "word": "conv"}, {
        "layer": [99, "0", 0.5, True], "word": [3, "con"],
    }),
    ([partial(analysis.find_sites, MODEL)], {"words": ["resid_pre"]}, {
        "words": ["resid_pre", [], ["resid_pry"]], "layers": [[], 1, [99], [0, 99]],
    }),
]  # fmt: skip
CASES = [
    (function, given, name, value)
    for functions, given, wrong in TABLE
    for function in functions
    for name, values in wrong.items()
    for value in values
]


def _id(value: object) -> str:
    name = getattr(getattr(value, "func", value), "__name__", "")
    return name if callable(value) else repr(value)[:24] if not isinstance(value, dict) else ""


@pytest.mark.parametrize(("function", "given", "name", "value"), CASES, ids=_id)
def test_refused_before_anything_runs(function, given, name, value):
    runs = []
    handle = MODEL.embed.register_forward_hook(lambda *_: runs.append(1))
    needed = inspect.signature(getattr(function, "func", function)).parameters
    try:
        with pytest.raises((ShapeError, ConfigError, HookNameError, TaskError)) as caught:
            arguments = {k: v for k, v in given.items() if k in needed or "options" in needed}
            function(**{**arguments, name: value})
    finally:
        handle.remove()
    assert len(str(caught.value)) > 20
    late = name in ("early", "late") or torch.is_tensor(value)  # which the run itself looks at
    assert late or not runs, f"{name}={value!r} was refused after the model had run"


@pytest.mark.parametrize("analyse", PATCHING[:3])
def test_a_tensor_of_positions_is_one_per_document_or_a_list_but_says_not_which(analyse):
    for at in (ANSWERS, ANSWERS[:2], torch.arange(10)):
        with pytest.raises(ShapeError, match=r'tensor \[batch\]; give {"query_item_orig"'):
            analyse(**PAIR, positions=at)
    named = analyse(**PAIR, positions={"query_item_orig": ANSWERS})
    assert named.positions == ["query_item_orig"]
    assert analyse(**PAIR, positions=ANSWERS.tolist()).positions == [1, 2, 3]


@pytest.mark.parametrize("analyse", PATCHING)
def test_messages_say_what_to_pass_instead(analyse):
    for wrong, message in (
        ({"clean": BATCH}, "clean=a TaskBatch.*Pass batch.tokens"),
        ({"corrupted": BATCH}, "Pass batch.tokens"),
        ({"read_at": 3}, r"read_at=3; allowed: integers \[batch\]"),
        ({"read_at": ANSWERS + 97}, r"in 0..9 .*got int64 \[3\], from 98 to 100"),
        ({"positions": {"foo": 3}}, "positions={'foo': 3}.*Look at 'foo': Pass a tensor"),
        ({"positions": {"foo": ANSWERS - 2}}, r"positions\['foo'\].*from -1 to 1"),
    ):
        if "positions" not in wrong or analyse is not analysis.edge_attribution:
            with pytest.raises(ShapeError, match=message):
                analyse(**{**PAIR, **wrong})


def test_a_model_runs_tokens_and_no_batch():
    for run in (MODEL, MODEL.run_with_cache):
        with pytest.raises(ShapeError, match="got a TaskBatch; pass its tokens: batch.tokens"):
            run(BATCH)


@pytest.mark.parametrize("analyse", [*ON_TASKS, analysis.induction_scores])
def test_a_task_with_a_larger_vocabulary_is_refused_as_in_training(analyse):
    task = AssociativeRecall(num_kv=64, num_pairs=2)
    with pytest.raises(TaskError, match=rf"needs d_vocab=67, but the model's is {D_VOCAB}"):
        analyse(MODEL, task, n=4)


@pytest.mark.parametrize("analyse", PATCHING)
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda logits: logits, "returned shape"),
        (lambda logits: logits.sum(), "returned shape"),
        (lambda logits: 1.0, "returned a float"),
        (lambda logits: None, "returned a NoneType"),
        (lambda logits: logits[:, 0] * NAN, "is NaN for 3 of 3 documents"),
    ],
)
def test_metrics_return_one_number_per_document(analyse, metric, message):
    with pytest.raises(ShapeError, match=message):
        analyse(MODEL, CLEAN, CORRUPTED, metric)


@pytest.mark.parametrize("analyse", PATCHING)
@pytest.mark.parametrize("make", [metrics.probability, metrics.rank, metrics.accuracy])
def test_answers_beyond_the_vocabulary_are_refused_before_any_run(analyse, make):
    metric = make(torch.tensor([1, 2, D_VOCAB]))
    with pytest.raises(ShapeError, match=rf"answers up to {D_VOCAB}.*allowed 0..{D_VOCAB - 1}"):
        analyse(MODEL, CLEAN, CORRUPTED, metric)
    with pytest.raises(ShapeError, match="answers up to"):
        metric(torch.zeros(3, D_VOCAB))


@pytest.mark.parametrize("analyse", PATCHING)
def test_a_distribution_over_another_vocabulary_is_refused_before_any_run(analyse):
    metric = metrics.kl(torch.zeros(3, D_VOCAB - 1))
    with pytest.raises(ShapeError, match=f"over {D_VOCAB - 1} tokens.*has {D_VOCAB}"):
        analyse(MODEL, CLEAN, CORRUPTED, metric)
    with pytest.raises(ShapeError, match="build it from logits of this model"):
        metric(torch.zeros(3, D_VOCAB))


@pytest.mark.parametrize(
    "hook",
    [
        ablation.mean(torch.zeros(())),
        ablation.mean(torch.zeros(1, 8)),
        ablation.resample(generator(), torch.zeros(())),
        ablation.resample(generator(), torch.zeros(0, 10, 8)),
        ablation.resample(generator(), torch.zeros(3, 9, 8)),
    ],
)
def test_a_reference_of_another_shape_is_refused(hook):
    with pytest.raises(ShapeError, match=r"ablation at blocks.0.hook_resid_pre: the reference"):
        MODEL.run_with_hooks(CLEAN, fwd_hooks=[("blocks.0.hook_resid_pre", hook)])


def test_weights_made_in_inference_mode_have_no_gradients():
    with torch.inference_mode():
        model = tiny("attention-2heads")
    for analyse in (analysis.attribution_patching, analysis.edge_attribution):
        with pytest.raises(ConfigError, match=r"made inside torch.inference_mode\(\)"):
            analyse(model, CLEAN, CORRUPTED, difference())
    with pytest.raises(ConfigError, match=r"made inside torch.inference_mode\(\)"):
        analysis.token_mixing(model, CLEAN, 0).reduce("logit", at=ANSWERS, token=ANSWERS)
    mixing = MIXING.reduce("logit", at=ANSWERS, token=ANSWERS)
    with torch.inference_mode():  # of the caller alone: no obstacle
        again = analysis.token_mixing(MODEL, CLEAN, 0).reduce("logit", at=ANSWERS, token=ANSWERS)
    assert again.equal(mixing)


def test_probes_need_something_to_tell_apart_in_every_fold():
    one = TaskBatch(**{**vars(BATCH), "answer": torch.full_like(BATCH.answer, 9)})
    with pytest.raises(TaskError, match="one and the same label"):
        analysis.linear_probes(MODEL, TASK, batch=one, targets=["answer"], folds=2)
    found = analysis.linear_probes(MODEL, TASK, n=16, targets=["key"], folds=2)
    with pytest.raises(ConfigError, match="unknown column 'score'"):
        found.table("key", "score")


def test_negative_layers_count_from_the_end_everywhere():
    sites = analysis.find_sites(MODEL, ["resid_pre"], [-1])
    assert [site.layer for site in sites] == [1] == [analysis.find_site(MODEL, -1, "q").layer]
    result = analysis.activation_patching(MODEL, CLEAN, CORRUPTED, difference(), layers=[-1])
    assert result.sites["resid_pre"].layers == [1]


def test_logit_weights_check_where_and_whose():
    mixing = analysis.token_mixing(MODEL, CLEAN, 0)
    at = torch.tensor([9, 9, 9])
    for wrong in ({"at": at + 1}, {"at": at[:2]}, {"token": ANSWERS + D_VOCAB}, {"token": at[:2]}):
        with pytest.raises(ShapeError):
            mixing.reduce("logit", **{"at": at, "token": ANSWERS, **wrong})
    for most in (0, "3", True):
        with pytest.raises(ConfigError, match="most="):
            mixing.strongest(most)


@pytest.mark.parametrize(
    "arguments", [{"edges": "3"}, {"edges": 1.5}, {"threshold": "0"}, {"threshold": NAN}, {}]
)
def test_circuits(arguments):
    found = analysis.edge_attribution(MODEL, CLEAN, CORRUPTED, difference())
    with pytest.raises(ConfigError):
        found.circuit(**arguments)
    with pytest.raises(ConfigError, match="faithfulness="):
        found.smallest("0.9")


def test_ctrl_c_keeps_what_was_measured():
    calls = []

    def metric(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:  # two unpatched runs, three cells
            raise KeyboardInterrupt
        return logits[:, 0]

    result = analysis.activation_patching(MODEL, CLEAN, CORRUPTED, metric)
    measured = ~result.sites["resid_pre"].values.isnan()
    assert result.interrupted and measured.any() and not measured.all()
    whole = analysis.activation_patching(MODEL, CLEAN, CORRUPTED, lambda logits: logits[:, 0])
    assert not whole.interrupted
    assert torch.equal(
        result.sites["resid_pre"].values[measured], whole.sites["resid_pre"].values[measured]
    )
    calls[:] = [1] * 3  # so that the first cell is interrupted: nothing to keep
    with pytest.raises(KeyboardInterrupt):
        analysis.activation_patching(MODEL, CLEAN, CORRUPTED, metric)
    assert not any(hook.has_hooks() for hook in MODEL.hook_points())


def test_every_long_call_has_progress_off_by_default():
    for function in (
        analysis.activation_patching,
        analysis.path_patching,
        analysis.mechanistic_evaluation,
        analysis.mechanism_report,
        analysis.detection_scores,
        analysis.linear_probes,
    ):
        assert inspect.signature(function).parameters["progress"].default is False


def test_all_annotations_can_be_read():
    for name in analysis.__all__:
        function = getattr(analysis, name)
        if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
            with pytest.raises((HookedSSMError, TypeError, AttributeError, ValueError)):
                function(*[object()] * 9)
