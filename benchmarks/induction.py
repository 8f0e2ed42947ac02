"""How trained small models do induction: heads, convolutions, and Mamba without a convolution.

    python benchmarks/induction.py --seeds 0 1 2

Trains the demo's attention, Based and Mamba by its recipes, and Mamba with a convolution of width
1 and without one, on associative recall, and prints the tables of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import time

import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.induction import detection_scores
from hooked_ssm.analysis.mechanism_report import MechanismReport, mechanism_report
from hooked_ssm.demo import RECIPES, TASK
from hooked_ssm.training import TrainConfig, train

MODELS = {
    "attention": ("attention", {}),
    "based": ("based", {}),
    "mamba": ("mamba", {}),
    "mamba, width 1": ("mamba", {"d_conv": 1}),
    "mamba, width 0": ("mamba", {"d_conv": 0}),
}
HEADS = {0: "previous_token", 1: "induction"}


def trained(architecture: str, options: dict, seed: int) -> HookedModel:
    """Train by the demo's recipe, whatever the mixer's options."""
    phases = RECIPES[architecture]
    cfg = ModelConfig(
        architecture=architecture,
        options=options,
        d_model=64,
        n_layers=2,
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
    """Scores of the kind of head wanted in each layer, by pattern and by removal."""
    rows = []
    for layer, kind in HEADS.items():
        scores = detection_scores(model, kind, TASK, layers=[layer], causal=True, n=256)
        frame = scores.frame
        row = frame[(frame["unit"] == "layer")].iloc[0]
        rows.append(
            f"{kind:14} in layer {layer} | {row['score']:.2f} ± {row['error']:.2f} | "
            f"{row['chance']:.2f} | {row['drop']:.2f} ± {row['drop_error']:.2f} | "
            f"{row['control_drop']:.2f} ± {row['control_error']:.2f}"
        )
    return rows


def inside_rows(report: MechanismReport) -> list[str]:
    """What restoring one thing inside the mixers gives back."""
    frame = report.inside[report.inside["site"].isin(["mixer_in", "conv_in", "conv", "write"])]
    rows = []
    for (layer, site), part in frame.groupby(["layer", "site"], sort=False):
        cells = (f"{r.restore} {r.attribution:.2f}" for r in part.itertuples())
        rows.append(f"layer {layer} {site:8} | " + " | ".join(cells))
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
