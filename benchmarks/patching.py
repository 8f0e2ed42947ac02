"""How much a full patching sweep saves over one forward per cell, with equal values.

    python benchmarks/patching.py [--small] [--full] [--resume]
First a 2-layer model of each architecture on associative recall, 64 documents, layers x positions
x (resid_pre, mixer_out), against transformer-lens' `generic_activation_patch`. Then a Mamba of
130M parameters' shape (24 layers, random weights, 64 tokens, batch 4), where the loop's cells are
sampled and their mean time multiplied, since all of them would take hours; ours sweeps a quarter
and three quarters up, whose mean cost is the sweep's, or with --full every layer. Its memory is
held against its budget: `max_batch` documents in one forward. --resume shows what resuming at the
patched position saves per architecture.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from peak_memory import peak_mib
from torch import Tensor
from transformer_lens.patching import generic_activation_patch, layer_pos_patch_setter

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.engine import Cell, Interchange
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.patching_result import ActivationPatching
from hooked_ssm.analysis.sites import find_sites
from hooked_ssm.mixers import MIXERS
from hooked_ssm.tasks import AssociativeRecall

SITES = ("resid_pre", "mixer_out")
MAX_BATCH = 64  # of the large model's sweep
TASK = AssociativeRecall(num_kv=8192, num_pairs=16)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds (of all threads): what others run on the machine does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def loop(
    model: HookedModel, clean: Tensor, corrupted: Tensor, metric: metrics.Metric, read: Tensor
) -> dict:
    """transformer-lens' sweep: one forward per cell. site -> [layer, pos, batch]"""
    _, cache = model.run_with_cache(clean, names_filter=lambda n: n.endswith(SITES))
    rows = torch.arange(len(clean))
    found = {}
    for site in SITES:
        found[site] = generic_activation_patch(
            model, corrupted, cache, lambda logits: metric(logits[rows, read]),
            layer_pos_patch_setter, site, index_axis_names=("layer", "pos"), reduce="none",
        ).values  # fmt: skip
    return found


@torch.no_grad()
def recall(name: str, documents: int) -> None:
    cfg = ModelConfig(architecture=name, d_model=64, n_layers=2, d_vocab=TASK.d_vocab, n_ctx=64)
    model = HookedModel(cfg).eval()
    generator = torch.Generator().manual_seed(0)
    batch = TASK.sample(documents, "test", generator=generator).trim()
    corrupted = TASK.corrupt(batch, "query_item_orig", generator=generator).tokens
    metric, read = metrics.probability(batch.answer), batch.positions["query_item"]
    patched: dict = {}

    def ours() -> None:
        patched["result"] = activation_patching(
            model, batch.tokens, corrupted, metric, sites=SITES, read_at=read
        )

    ours()
    fast = min(seconds(ours) for _ in range(3))
    held = peak_mib(ours)
    slow = seconds(lambda: patched.update(loop(model, batch.tokens, corrupted, metric, read)))
    error = max((patched["result"].result(s).values - patched[s]).abs().max().item() for s in SITES)
    print(f"{name:16} {slow:8.2f} {fast:8.3f} {slow / fast:7.0f}x {error:9.1e} {held:7.0f} MiB")


@torch.no_grad()
def resuming(name: str, documents: int) -> None:
    """Every token differs, so that nothing can be skipped: what resuming alone saves."""
    cfg = ModelConfig(architecture=name, d_model=64, n_layers=2, d_vocab=67, n_ctx=64)
    model = HookedModel(cfg).eval()
    clean, corrupted = torch.randint(
        67, (2, documents, 36), generator=torch.Generator().manual_seed(0)
    )
    read = torch.full((documents,), 35)
    cells = [
        Cell(site, torch.full((documents,), t))
        for site in find_sites(model, SITES)
        for t in range(36)
    ]
    engines = [Interchange(model, clean, corrupted, read, resume=r) for r in (False, True, None)]
    times = [
        min(seconds(lambda e=engine: list(e.run(cells))) for _ in range(2)) for engine in engines
    ]
    chosen = "resumes" if engines[2]._resumes else "does not"
    print(f"{name:16} {times[0]:8.2f} {times[1]:8.2f} {times[0] / times[1]:7.2f}x   {chosen}")


@torch.no_grad()
def large(n_layers: int, d_model: int, d_vocab: int, sampled: int, full: bool) -> None:
    cfg = ModelConfig(
        architecture="mamba", d_model=d_model, n_layers=n_layers, d_vocab=d_vocab, n_ctx=64,
        init="uniform",
    )  # fmt: skip
    model = HookedModel(cfg).eval()
    generator = torch.Generator().manual_seed(0)
    clean, fresh = torch.randint(d_vocab, (2, 4, 64), generator=generator)
    one = clean.clone()
    one[:, 8] = fresh[:, 8]
    metric = metrics.logit_difference(clean[:, 0], clean[:, 1])
    layers = list(range(n_layers)) if full else [n_layers // 4 - 1, 3 * n_layers // 4]
    total, share = n_layers * 128, n_layers / len(layers)
    many = clean.repeat(MAX_BATCH // len(clean), 1)
    model(many)
    budget = peak_mib(lambda: model(many))
    print(
        f"\nMamba, {n_layers} layers, d_model {d_model}, d_vocab {d_vocab}, 64 tokens, batch 4; "
        f"one forward of {MAX_BATCH} documents takes {budget:.0f} MiB"
    )
    for what, corrupted in (("every token differs", fresh), ("token 8 differs", one)):
        results: list[ActivationPatching] = []
        sweep = partial(
            activation_patching, model, clean, corrupted, metric, sites=SITES, layers=layers,
            max_batch=MAX_BATCH,
        )  # fmt: skip
        times: list[float] = []
        timed = partial(seconds, lambda run=sweep, to=results: to.append(run()))
        held = peak_mib(lambda run=timed, to=times: to.append(run()))
        fast = share * times[0]
        slow, error, most = sample_loop(model, clean, corrupted, metric, results[0], sampled)
        print(
            f"{what:20} loop {slow * total:8.1f} s ({sampled} of {total} cells timed), ours "
            f"{fast:7.1f} s (layers {'all' if full else layers}), {slow * total / fast:5.1f}x, "
            f"error {error:.1e} of effects up to {most:.1e}, memory {held:.0f} MiB "
            f"({'within' if held <= budget else 'OVER'} the budget)"
        )


def sample_loop(
    model: HookedModel,
    clean: Tensor,
    corrupted: Tensor,
    metric: metrics.Metric,
    result: ActivationPatching,
    sampled: int,
) -> tuple[float, float, float]:
    """Seconds per cell of the loop, the largest difference from ours, the largest effect."""
    generator = torch.Generator().manual_seed(1)
    layers = result.sites[SITES[0]].layers
    _, cache = model.run_with_cache(clean, names_filter=lambda n: n.endswith(SITES))
    times, error, most = [], 0.0, 0.0
    for cell in torch.randperm(len(layers) * 128, generator=generator)[:sampled].tolist():
        site, row, t = SITES[cell % 2], cell // 2 % len(layers), cell // 2 // len(layers)
        name = model.hook_name(layers[row], site)

        def put(x: Tensor, hook: object, name: str = name, t: int = t) -> Tensor:
            x[:, t] = cache[name][:, t]
            return x

        start = time.process_time()
        value = metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, put)])[:, -1])
        times.append(time.process_time() - start)
        got = result.result(site)
        error = max(error, (got.values[row, t] - value).abs().max().item())
        most = max(most, got.effect()[row, t].abs().max().item())
    return sum(times) / len(times), error, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", nargs="+", default=["attention", "based", "mamba"])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="8 layers of width 256 at the end")
    parser.add_argument("--full", action="store_true", help="every layer of the large model")
    parser.add_argument("--resume", action="store_true", help="compare resuming, and stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.resume:
        print(f"{'architecture':16} {'from 0':>8} {'resumed':>8} {'ratio':>8}   on its own")
        for name in MIXERS:
            resuming(name, args.documents)
        return
    print(f"{'architecture':16} {'loop s':>8} {'ours s':>8} {'ratio':>8} {'error':>9} {'peak':>11}")
    for name in args.architectures:
        recall(name, args.documents)
    large(*((8, 256, 4096, 24) if args.small else (24, 768, 50280, 16)), full=args.full)


if __name__ == "__main__":
    main()
