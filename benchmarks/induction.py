"""How trained small models do induction: heads, convolutions, and Mamba without a convolution.

    python benchmarks/induction.py --seeds 0 1 2

Trains the demo's attention, Based and Mamba by its recipes, and Mamba in one layer (whose only
block is the last one), with a convolution of width 1 and without one, on associative recall, and
prints the tables of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import time

import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.induction import detection_scores
from hooked_ssm.analysis.mechanism_report import MechanismReport, mechanism_report
from hooked_ssm.demo import RECIPES, TASK
from hooked_ssm.tasks.base import IGNORE_INDEX
from hooked_ssm.training import TrainConfig, train

# architecture, layers, mixer options
MODELS = {
    "attention": ("attention", 2, {}),
    "based": ("based", 2, {}),
    "mamba": ("mamba", 2, {}),
    "mamba, 1 layer": ("mamba", 1, {}),
    "mamba, width 1": ("mamba", 2, {"d_conv": 1}),
    "mamba, width 0": ("mamba", 2, {"d_conv": 0}),
}
HEADS = {0: "previous_token", 1: "induction"}


def trained(architecture: str, n_layers: int, options: dict, seed: int) -> HookedModel:
    """Train by the demo's recipe, whatever the mixer's options."""
    phases = RECIPES[architecture]
    cfg = ModelConfig(
        architecture=architecture,
        options=options,
        d_model=64,
        n_layers=n_layers,
        d_vocab=TASK.d_vocab,
        n_ctx=max(phase.task.max_length for phase in phases),
        init="uniform",
        seed=seed,
    )
    model = HookedModel(cfg)
    for phase in phases:
        config = TrainConfig(
            steps=phase.steps, batch_size=phase.batch_size, lr=phase.lr, seed=seed,
            eval_every=500, eval_size=64,
        )  # fmt: skip
        train(model, phase.task, config, progress=False)
    return model


def head_rows(model: HookedModel) -> list[str]:
    """Scores of the kind of head wanted in each layer, by pattern and by removal.

    By pattern, the previous token counts at the values in context, induction at the query; what a
    token takes of itself is left out, as a convolution's skip would outweigh all else. Removed is
    the mixing at all offsets of the kind.
    """
    batch = TASK.sample(256, "test", generator=torch.Generator().manual_seed(0))
    context = torch.arange(batch.tokens.shape[1]) < batch.positions["divider"][:, None]
    is_value = (batch.tokens >= TASK.values.start) & (batch.tokens < TASK.values.stop)
    counted = {"previous_token": is_value & context, "induction": batch.labels != IGNORE_INDEX}
    rows = []
    for layer, kind in HEADS.items():
        scores = detection_scores(
            model, kind, batch, layers=[layer], queries=counted[kind], exclude_current_token=True
        )
        removed = detection_scores(model, kind, batch, layers=[layer], causal=True)
        score, lost = (x.frame[x.frame["unit"] == "layer"].iloc[0] for x in (scores, removed))
        rows.append(
            f"| {kind} in layer {layer} | {score['score']:.2f} ± {score['error']:.2f} | "
            f"{score['chance']:.2f} | {lost['drop']:.2f} ± {lost['drop_error']:.2f} | "
            f"{lost['control_drop']:.2f} ± {lost['control_error']:.2f} |"
        )
    return ["", "| scored | share of mixing | chance | lost without it | lost without others |",
            "|---|---|---|---|---|", *rows]  # fmt: skip


def inside_rows(report: MechanismReport) -> list[str]:
    """What restoring one thing inside the mixers gives back, as a table."""
    frame = report.inside
    frame = frame[frame["site"].isin(["mixer_in", "conv_in", "conv", "write", "carry", "mixed"])]
    places = list(dict.fromkeys(frame["restore"]))
    rows = ["", "| restored | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    for (layer, site), part in frame.groupby(["layer", "site"], sort=False):
        cell = part.set_index("restore")["attribution"]
        cells = (f"{cell[place]:.2f}" if place in cell else "" for place in places)
        rows.append(f"| layer {layer} {site} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--save", help="folder to keep the trained models in")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for seed in args.seeds:
        for name in args.models:
            start = time.perf_counter()
            model = trained(*MODELS[name], seed)
            if args.save:
                model.save_pretrained(
                    f"{args.save}/{name.replace(', ', '-').replace(' ', '')}-{seed}"
                )
            seconds = time.perf_counter() - start
            report = mechanism_report(model, TASK, 512)
            timing = f" ({report.evaluation.timing})" if report.evaluation.timing else ""
            print(f"\n## {name}, seed {seed} ({seconds:.0f} s)")
            where = (
                "" if report.layer is None else f"; {report.association} of layer {report.layer}"
            )
            print(f"{report.mechanism}{timing}{where}")
            print("\n".join(f"- {sentence}" for sentence in report.evidence))
            if report.mechanism == "unsolved":
                continue
            print("\n".join(inside_rows(report)))
            if name in ("attention", "based"):
                print("\n".join(head_rows(model)), flush=True)


if __name__ == "__main__":
    main()
