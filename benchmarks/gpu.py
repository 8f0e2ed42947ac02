"""Our Triton kernels on a GPU: states none, some, all; against a copy, and against others' kernels.

    python benchmarks/gpu.py            # prints the table for RESULTS.md; --only NAME ... for some

The copy moves as many bytes as the op has to: inputs read and outputs written once (backward:
twice that). mamba_ssm, causal_conv1d and fla run if they are installed; they give no states.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.ops.delta_rule import delta_rule, l2_normalise
from hooked_ssm.ops.gla import gla
from hooked_ssm.ops.linear_attention import linear_attention
from hooked_ssm.ops.selective_scan import selective_scan
from hooked_ssm.ops.short_conv import short_conv
from hooked_ssm.ops.ssd import ssd

Draw = Callable[..., Tensor]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One op at a model's size.

    Attributes:
        run: Ours.
        make: Inputs, given batch, length and the sizes.
        sizes, tiny: Of a model of about 130M parameters, and for a test of this file.
        module, theirs: Where another kernel of the same op is, and how it is called on our inputs.
        wanted: The option that asks for states.
    """

    run: Callable[..., Any]
    make: Callable[..., Inputs]
    sizes: tuple[int, ...]
    tiny: tuple[int, ...]
    module: str
    theirs: Callable[[Any, Inputs], Any]
    wanted: str = "return_states"


@dataclass(frozen=True)
class Row:
    """What was measured: milliseconds, and how many copies of the same bytes they are."""

    op: str
    who: str
    states: str
    forward_ms: float
    both_ms: float
    forward_copies: float
    both_copies: float


def make_selective(draw: Draw, b: int, t: int, e: int, n: int) -> Inputs:
    return {
        "x": draw(b, t, e),
        "dt": F.softplus(draw(b, t, e) - 1),
        "A": -draw(e, n).exp(),
        "B": draw(b, t, n),
        "C": draw(b, t, n),
    }


def make_ssd(draw: Draw, b: int, t: int, h: int, d: int, n: int) -> Inputs:
    return {
        "x": draw(b, t, h, d),
        "dt": F.softplus(draw(b, t, h) - 1),
        "A": -draw(h).exp(),
        "B": draw(b, t, 1, n),
        "C": draw(b, t, 1, n),
    }


def make_linear(draw: Draw, b: int, t: int, h: int, f: int, d: int) -> Inputs:
    return {"q": draw(b, t, h, f), "k": draw(b, t, h, f), "v": draw(b, t, h, d)}


def make_gla(draw: Draw, *size: int) -> Inputs:
    qkv = make_linear(draw, *size)
    return qkv | {"log_decay": F.logsigmoid(draw(*qkv["k"].shape))}


def make_delta(draw: Draw, *size: int) -> Inputs:
    qkv = make_linear(draw, *size)
    beta = draw(*qkv["k"].shape[:3]).sigmoid()
    return {"q": qkv["q"], "k": l2_normalise(qkv["k"]), "v": qkv["v"], "beta": beta}


def make_gated(draw: Draw, *size: int) -> Inputs:
    inputs = make_delta(draw, *size)
    return inputs | {"log_decay": F.logsigmoid(draw(*inputs["beta"].shape))}


def make_conv(draw: Draw, b: int, t: int, e: int, w: int) -> Inputs:
    return {"x": draw(b, t, e), "weight": draw(e, w), "bias": draw(e)}


def their_selective(m: Any, i: Inputs) -> Any:
    x, dt, B, C = (i[n].transpose(1, 2).contiguous() for n in ("x", "dt", "B", "C"))
    return m.selective_scan_fn(x, dt, i["A"], B, C)


CASES = {
    "selective_scan": Case(
        selective_scan,
        make_selective,
        (1536, 16),
        (5, 3),
        "mamba_ssm.ops.selective_scan_interface",
        their_selective,
    ),
    "ssd": Case(
        ssd,
        make_ssd,
        (24, 64, 128),
        (2, 3, 5),
        "mamba_ssm.ops.triton.ssd_combined",
        lambda m, i: m.mamba_chunk_scan_combined(**i, chunk_size=256),
    ),
    "linear_attention": Case(
        linear_attention,
        make_linear,
        (12, 256, 64),
        (2, 5, 3),
        "fla.ops.linear_attn",
        lambda m, i: m.chunk_linear_attn(**i, scale=1.0, normalize=False),
    ),
    "gla": Case(
        gla,
        make_gla,
        (4, 128, 256),
        (2, 5, 3),
        "fla.ops.gla",
        lambda m, i: m.chunk_gla(i["q"], i["k"], i["v"], i["log_decay"]),
    ),
    "delta_rule": Case(
        delta_rule,
        make_delta,
        (8, 128, 128),
        (2, 5, 3),
        "fla.ops.delta_rule",
        lambda m, i: m.chunk_delta_rule(**i),
    ),
    "gated_delta_rule": Case(
        delta_rule,
        make_gated,
        (6, 256, 256),
        (2, 5, 3),
        "fla.ops.gated_delta_rule",
        lambda m, i: m.chunk_gated_delta_rule(i["q"], i["k"], i["v"], i["log_decay"], i["beta"]),
    ),
    "short_conv": Case(
        short_conv,
        make_conv,
        (1536, 4),
        (5, 4),
        "causal_conv1d",
        lambda m, i: m.causal_conv1d_fn(i["x"].transpose(1, 2), i["weight"], i["bias"]),
        "return_windows",
    ),
}


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of several runs after two that do not count (kernels are compiled there)."""
    times = []
    for turn in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def copy_ms(size: int, device: torch.device, repeats: int) -> float:
    """A copy that reads and writes `size` bytes in all."""
    source = torch.zeros(max(size // 8, 1), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), device, repeats)


def tensors_of(result: Any) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)
    return [t for t in found if isinstance(t, Tensor)]


def measure(
    op: str, who: str, states: str, run: Callable[[Inputs], Any], inputs: Inputs, repeats: int
) -> Row:
    """Time one op forwards, and forwards and backwards with a gradient for every output."""
    device = next(iter(inputs.values())).device
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    with torch.no_grad():
        outputs = tensors_of(run(inputs))
    weights = [torch.ones_like(t) for t in outputs]
    size = sum(t.numel() * t.element_size() for t in (*inputs.values(), *outputs))
    del outputs

    @torch.no_grad()
    def forward() -> None:
        run(inputs)

    def both() -> None:
        outputs = tensors_of(run(leaves))
        torch.autograd.backward(outputs, weights)
        for leaf in leaves.values():
            leaf.grad = None

    times = milliseconds(forward, device, repeats), milliseconds(both, device, repeats)
    copies = copy_ms(size, device, repeats), copy_ms(3 * size, device, repeats)
    return Row(op, who, states, *times, times[0] / copies[0], times[1] / copies[1])


def rows_of(
    op: str, device: torch.device, *, batch: int, length: int, tiny: bool, repeats: int
) -> Iterator[Row]:
    """Ours with no, some and all states, and the other kernel if it is installed."""
    case = CASES[op]
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    inputs = case.make(draw, batch, length, *(case.tiny if tiny else case.sizes))
    some = [length // 4, length // 2, length - 1]
    for states, wanted in (("none", False), (f"{len(some)}", some), ("all", True)):
        options = {case.wanted: wanted}
        yield measure(op, "ours", states, lambda i, o=options: case.run(**i, **o), inputs, repeats)
    try:
        theirs = importlib.import_module(case.module)
    except ImportError:
        return
    who = case.module.split(".")[0]
    if op in ("gla", "delta_rule", "gated_delta_rule", "linear_attention", "ssd"):
        inputs = {n: t.bfloat16() if t.ndim == 4 else t for n, t in inputs.items()}
        who += " (bfloat16)"  # their matrix products need it
    yield measure(op, who, "none", lambda i: case.theirs(theirs, i), inputs, repeats)


def markdown(rows: list[Row]) -> str:
    """The table, one line a row."""
    head = "| op | kernel | states | forward ms | x copy | forward + backward ms | x copy |"
    lines = [head, "|---" * 7 + "|"]
    for r in rows:
        lines.append(
            f"| {r.op} | {r.who} | {r.states} | {r.forward_ms:.3f} | {r.forward_copies:.1f} "
            f"| {r.both_ms:.3f} | {r.both_copies:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device, and torch finds none here")
    device = torch.device("cuda")
    rows: list[Row] = []
    for op in args.only:
        given = {"batch": args.batch, "length": args.length, "repeats": args.repeats}
        rows += rows_of(op, device, tiny=False, **given)
    print(f"{torch.cuda.get_device_name()}, batch {args.batch}, {args.length} tokens, float32\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
