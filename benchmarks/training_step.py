"""Milliseconds of a training step per architecture, at the paper's associative recall.

d_model 64, 2 layers, batch 32, 8,192 keys and values, 16 pairs, answer-only loss:
    python benchmarks/training_step.py
The paper's code needs 91 (attention), 103 (BaseConv), 106 (Based), 202 ms (Mamba) on 2 such cores.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.tasks import AssociativeRecall, Stream
from hooked_ssm.training import TrainConfig, training_loss
from hooked_ssm.training.optimizer import build_optimizer

DEFAULT = ["attention", "base_conv", "based", "mamba"]
TASK = AssociativeRecall(num_kv=8192, num_pairs=16)


def milliseconds(architecture: str, steps: int, d_model: int, batch_size: int) -> list[float]:
    """Time whole steps: draw documents, forward, backward, update."""
    cfg = ModelConfig(
        architecture=architecture, d_model=d_model, n_layers=2, d_vocab=TASK.d_vocab, n_ctx=64
    )
    model = HookedModel(cfg)
    config = TrainConfig(steps=steps, batch_size=batch_size, lr=1e-3, seed=0)
    optimizer, stream = build_optimizer(model, config), Stream(TASK, 0)
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        loss = training_loss(model, stream.next(batch_size), "answer")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'architecture':16} {'median ms':>10} {'min ms':>8}")
    for name in args.architectures:
        times = milliseconds(name, args.steps, 64, 32)
        print(f"{name:16} {statistics.median(times):10.1f} {min(times):8.1f}")


if __name__ == "__main__":
    main()
