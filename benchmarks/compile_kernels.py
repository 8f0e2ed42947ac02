"""Compile every Triton kernel down to machine code on a machine without a GPU.

    python benchmarks/compile_kernels.py [--arch 80 90] [--json] [NAME ...]

The ops run forwards and backwards on meta tensors of a realistic size; every kernel they would
start is compiled with just these argument types, tile sizes and warps. Prints registers a thread,
bytes spilled and shared memory, as triton's own ptxas reports them. Needs triton, and no
TRITON_INTERPRET in the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hooked_ssm.ops.diagonal_ssm.triton import diagonal_ssm_triton
from hooked_ssm.ops.matrix_state_triton import matrix_state_scan
from hooked_ssm.ops.selective_scan.triton import selective_scan_triton
from hooked_ssm.ops.short_conv.triton import short_conv_triton

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one kernel of one case."""

    case: str
    kernel: str
    arch: int
    warps: int
    registers: int
    spills: int
    shared_bytes: int
    cubin_bytes: int


Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data whose gradient is wanted."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def _both_ways(run: Callable[[], Any]) -> None:
    """Run an op and its backward pass, with a gradient for each of its outputs."""
    outputs = [t for t in run() if t is not None]
    sum(t.abs().sum().double() for t in outputs).backward()


def _selective_scan(core: torch.dtype, given: torch.dtype, groups: int) -> None:
    batch, length, channels, n = 2, 1024, 1536, 16
    x, dt = meta(batch, length, channels, dtype=given), meta(batch, length, channels, dtype=core)
    B, C = (meta(batch, length, groups, n, dtype=given) for _ in range(2))
    A, start = meta(channels, n, dtype=core), meta(batch, channels, n, dtype=core)
    _both_ways(lambda: selective_scan_triton(x, dt, A, B, C, start, [3, 77]))


def _short_conv(core: torch.dtype, given: torch.dtype, width: int) -> None:
    x, weight = meta(2, 1024, 1536, dtype=given), meta(1536, width, dtype=core)
    bias, window = meta(1536, dtype=core), meta(2, 1536, width - 1, dtype=core)
    _both_ways(lambda: short_conv_triton(x, weight, bias, window, [3, 77]))


def _matrix_state(
    core: torch.dtype, given: torch.dtype, sizes: tuple[int, ...], parts: str, decay: str = ""
) -> None:
    """sizes: heads, groups, feature, d_head. parts: of q v beta write. decay: head or key."""
    batch, length, (heads, groups, features, width) = 2, 1024, sizes
    rows = (batch, length, heads)
    tensors = {
        "q": meta(batch, length, groups, features, dtype=given),
        "k": meta(batch, length, groups, features, dtype=given),
        "v": meta(*rows, width, dtype=given),
        "beta": meta(*rows, 1, dtype=given),
        "write": meta(*rows, features, width, dtype=core),
    }
    tensors = {n: t for n, t in tensors.items() if n in ["k", *parts.split()]}
    if decay:
        decays = rows if decay == "head" else (*rows, features)
        tensors["log_decay"] = meta(*decays, dtype=core)
    tensors["initial_state"] = meta(batch, heads, features, width, dtype=core)
    q, v = tensors.pop("q", None), tensors.pop("v", None)
    _both_ways(lambda: matrix_state_scan(q, v=v, **tensors, return_states=[3, 77]))


def _diagonal_ssm(core: torch.dtype, sizes: tuple[int, ...], modes: int) -> None:
    """sizes: channels, inner axes."""
    complex_core = torch.complex64 if core == torch.float32 else torch.complex128
    u = meta(2, 1024, *sizes, dtype=core)
    dA, dB, C = (meta(sizes[0], modes, dtype=complex_core) for _ in range(3))
    start = meta(2, *sizes, modes, dtype=complex_core)
    _both_ways(lambda: diagonal_ssm_triton(u, dA, dB, C, start, [3, 77]))


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

CASES: dict[str, Callable[[], None]] = {
    "selective_scan": lambda: _selective_scan(F32, F32, 1),
    "selective_scan-bf16": lambda: _selective_scan(F32, BF16, 1),
    "selective_scan-float64-groups": lambda: _selective_scan(F64, F64, 3),
    "short_conv": lambda: _short_conv(F32, F32, 4),
    "short_conv-bf16": lambda: _short_conv(F32, BF16, 3),
    "short_conv-float64": lambda: _short_conv(F64, F64, 128),
    "linear_attention-based": lambda: _matrix_state(F32, F32, (12, 12, 273, 64), "q v"),
    "ssd-bf16": lambda: _matrix_state(F32, BF16, (24, 1, 128, 64), "q v", "head"),
    "ssd-float64": lambda: _matrix_state(F64, F64, (24, 1, 128, 64), "q v", "head"),
    "gla-bf16": lambda: _matrix_state(F32, BF16, (4, 4, 128, 256), "q v", "key"),
    "delta_rule": lambda: _matrix_state(F32, F32, (8, 8, 128, 128), "q v beta"),
    "delta_rule-gated": lambda: _matrix_state(F32, F32, (6, 6, 256, 512), "q v beta", "head"),
    "prediction_error": lambda: _matrix_state(F32, F32, (8, 8, 128, 128), "v beta", "head"),
    "delta_rule_from_writes": lambda: _matrix_state(F32, F32, (2, 2, 64, 64), "beta write", "head"),
    "diagonal_ssm": lambda: _diagonal_ssm(F32, (768,), 32),
    "diagonal_ssm-heads": lambda: _diagonal_ssm(F32, (8, 64, 64), 32),
    "diagonal_ssm-float64": lambda: _diagonal_ssm(F64, (8, 16, 16), 32),
}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect what would be launched instead of launching it."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, args, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def source_of(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """The kernel with the types, constants and alignments of this call, as a launch infers them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        pointer, special = isinstance(value, Tensor), not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and not pointer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS[value.dtype] if pointer else "i32"
        if pointer or (special and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_case(case: str, arch: int) -> list[Compiled]:
    """Compile each kernel that the case starts."""
    with recorded() as launches:
        CASES[case]()
    done = []
    for kernel, args, options in launches:
        warps = options["num_warps"]
        compiled = triton.compile(
            source_of(kernel, args, {n: v for n, v in options.items() if n != "num_warps"}),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps},
        )
        registers, spills = _resources(compiled.asm["ptx"], arch)
        done.append(
            Compiled(
                case,
                kernel.__name__,
                arch,
                warps,
                registers,
                spills,
                compiled.metadata.shared,
                len(compiled.asm["cubin"]),
            )
        )
    return done


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled to memory, by the ptxas that triton ships."""
    ptxas = triton.knobs.nvidia.ptxas.path
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={name}", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = said.replace(",", " ").split()
    registers = int(words[words.index("registers") - 1])
    stores = said.split(" bytes spill stores")[0].split()[-1]
    return registers, int(stores)


def main() -> None:
    """Compile what was asked for and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [c for name in args.names or CASES for a in args.arch for c in compile_case(name, a)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'case':30} {'kernel':28} sm  warps registers spill_bytes shared_bytes")
    for r in rows:
        print(
            f"{r.case:30} {r.kernel:28} {r.arch}  {r.warps:5} {r.registers:9} {r.spills:11} "
            f"{r.shared_bytes:12}"
        )


if __name__ == "__main__":
    main()
