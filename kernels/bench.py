"""Time, memory and distance to the roofline of every fused head that can run here.

    python kernels/bench.py                             # sizes by device: CPU minutes, GPU < 2 min
    python kernels/bench.py --sizes 16384,2048,130560   # rows M, width D, vocabulary V
    python kernels/bench.py --recipe recipes/justrl2-smollm2-135m-cpu.yaml  # M, D, V of a run

Results are checked first. The columns:

    s         median of the rounds; heads take turns, so that a busy machine slows all alike
    x first   times that of the first head, in the median over pairs
    TFLOP/s   2 MDV forward, 4 MDV backward, 2 MDV more where the backward makes the logits again
    GB/s      what must move: hidden and weight read once per direction, their gradients written
    roofline  seconds for the slower of the two at this machine's measured speeds
    reached   roofline / s
    MB more   peak memory beyond the inputs
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # run as a script, Python puts kernels/ there instead

from kernels import logprob_entropy  # noqa: E402

SIZES = {"cpu": [(2048, 576, 32_768)], "cuda": [(16_384, 2048, 130_560)]}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass
class Case:
    """A head and, for the Triton one, constants of kernels/logprob.py to replace."""

    name: str
    head: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    # Whether the backward makes the logits again: 2 MDV more
    recomputes: bool = True
    constants: dict = field(default_factory=dict)
    compiled: bool = False


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """What one writes first: logits in the model's dtype, softmax in float32."""
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@cache
def compile_naive() -> Callable:
    """The naive head under torch.compile."""
    return torch.compile(naive)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Liger's fused linear cross-entropy: the sum of the log-probs, no entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (-liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum"),)


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Cut cross-entropy: log-probs, no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    return (-linear_cross_entropy(hidden, weight, targets, reduction="none"),)


def cases(device: str) -> list[Case]:
    """The naive head first: the report divides by the first line."""
    found = [
        Case("naive", naive, recomputes=False),
        Case("naive, compiled", lambda *x: compile_naive()(*x), recomputes=False, compiled=True),
        Case("torch", partial(logprob_entropy, impl="torch")),
    ]
    if device == "cpu":
        return found
    from kernels import logprob

    def triton(name: str, **constants) -> Case:
        return Case(name, partial(logprob_entropy, impl="triton"), constants=constants)

    def tile(*block) -> dict:
        # For every kind of chip, so that the one in use has it
        return dict.fromkeys(logprob.BLOCKS, block)

    return found + [
        triton("triton"),
        # The constants of sm_90 with a choice of kernels/logprob.py changed in each
        triton("triton, by pointers", BLOCKS=tile(128, 256, 64, 8, 3, False)),
        triton("triton, all rows first", GROUP=2**20),
        triton("triton, 4 stages", BLOCKS=tile(128, 256, 64, 8, 4, True)),
        triton("triton, tile 128x128", BLOCKS=tile(128, 128, 64, 4, 4, True)),
        Case("liger (no entropy)", liger, recomputes=False),
        Case("cut-cross-entropy (no entropy)", cut_cross_entropy),
    ]


def inputs(M: int, D: int, V: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves whose logits have a standard deviation of 3; no temporary as large as they are."""
    torch.manual_seed(0)
    empty = partial(torch.empty, device=device, dtype=DTYPES[device])
    hidden, weight = empty(M, D).normal_(), empty(V, D).normal_(std=3 / D**0.5)
    targets = torch.randint(0, V, (M,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def step(case: Case, leaves: tuple[Tensor, Tensor, Tensor], backward: bool) -> None:
    """Forward, and backward from both outputs if there are two."""
    changed = nullcontext()
    if case.constants:
        changed = patch.multiple("kernels.logprob", **case.constants)
    with changed, torch.set_grad_enabled(backward):
        outputs = case.head(*leaves)
        if backward:
            # Not backward(), which would add to .grad from call to call
            torch.autograd.grad(sum(x.mean() for x in outputs), leaves[:2])


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one call."""
    # A launch returns before the GPU has done the work
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ceilings(device: str) -> tuple[float, float]:
    """FLOP/s of a large matrix product in the dtype of the run, and bytes/s of a copy."""
    # The best of ten: a roofline is what the machine can do
    n = 8192 if device == "cuda" else 1024
    a = torch.ones(n, n, device=device, dtype=DTYPES[device])
    b = torch.ones(2**28 if device == "cuda" else 2**25, device=device)
    c = torch.empty_like(b)
    product = min(seconds(lambda: a @ a, device) for _ in range(10))
    copy = min(seconds(lambda: c.copy_(b), device) for _ in range(10))
    # A product multiplies and adds; a copy reads and writes
    return 2 * n**3 / product, 2 * b.nbytes / copy


def extra_memory(case: Case, size: tuple[int, int, int], device: str, backward: bool) -> float:
    """Peak bytes beyond the inputs; on a CPU measured in a fresh process."""
    if device == "cpu":
        worker = [sys.executable, __file__, "--memory-of", case.name, "--sizes"]
        worker += [",".join(map(str, size)), *(["--backward"] if backward else [])]
        return float(subprocess.run(worker, check=True, capture_output=True, text=True).stdout)
    leaves = inputs(*size, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(case, leaves, backward)
    return torch.cuda.max_memory_allocated() - before


def print_own_extra_memory(name: str, size: tuple[int, int, int], backward: bool) -> None:
    """What the fresh process of `extra_memory` does. Linux only: a process can read and reset the
    peak of its memory there.
    """

    def status(key: str) -> int:
        line = next(x for x in open("/proc/self/status") if x.startswith(key))
        return 1024 * int(line.split()[1])

    case = next(c for c in cases("cpu") if c.name == name)
    step(case, inputs(8, size[1], 64, "cpu"), backward)  # libraries allocate on first use
    leaves = inputs(*size, "cpu")
    # 5 resets the peak, VmHWM
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step(case, leaves, backward)
    print(status("VmHWM") - before)


def check(device: str) -> None:
    """Compare what "auto" picks with float64 (CPU) or float32 products (CUDA); stop if it is wrong.

    All logits are lowered by 10 and V is not a multiple of a tile, so columns beyond V would show.
    """
    M, D = (2049, 2048) if device == "cuda" else (257, 64)
    exact = torch.float32 if device == "cuda" else torch.float64
    for V in (1000, 130_560 if device == "cuda" else 4099):
        hidden, weight, targets = inputs(M, D, V, device)
        results = []
        for dtype, impl in ((hidden.dtype, "auto"), (exact, "torch")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
            bias = torch.full((V,), -10.0, device=device, dtype=exact)
            outputs = logprob_entropy(*leaves, targets, bias=bias, impl=impl)
            results.append([*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), leaves)])
        pairs = [(a.double(), b.double()) for a, b in zip(*results, strict=True)]
        errors = [(a - b).abs().max().item() for a, b in pairs[:2]]
        errors += [((a - b).norm() / b.norm()).item() for a, b in pairs[2:]]
        print(
            f"V {V}: errors of log-prob, entropy, dhidden, dweight", *(f"{e:.1e}" for e in errors)
        )
        # Gradients in bf16 keep 8 bits: 2^-8 is 4e-3
        if max(errors[:2]) > 1e-4 or max(errors[2:]) > (6e-3 if device == "cuda" else 1e-5):
            raise SystemExit("The head is wrong on this machine; timing it would be pointless.")


def measure(size: tuple[int, int, int], device: str, rounds: int, heads: list[str]) -> list[tuple]:
    """[(case, extra bytes, times)], the last two as (forward, forward and backward)."""
    rows = []
    for case in cases(device):
        if heads and case.name not in heads:
            continue
        try:
            for backward in (False, True) if case.compiled else ():
                step(case, inputs(*size, device), backward)  # compiling must not be measured
            memory = [math.nan] * 2
            if device == "cuda" or not case.compiled:
                memory = [extra_memory(case, size, device, backward) for backward in (False, True)]
            rows.append((case, memory, ([], [])))
        except Exception as error:  # not installed, no C++ compiler, out of memory, ...
            reason = (str(error).strip() or "?").splitlines()[0]
            print(f"{case.name}: left out, {type(error).__name__}: {reason}")
    leaves = inputs(*size, device)
    for _ in range(rounds):
        for backward in (False, True):
            for case, _, times in rows:
                times[backward].append(seconds(partial(step, case, leaves, backward), device))
    return rows


def report(size: tuple[int, int, int], device: str, rounds: int, heads: list[str]) -> None:
    """Print one table for the forward and one for forward and backward."""
    M, D, V = size
    flops, bandwidth = ceilings(device)
    print(
        f"\nM {M}, D {D}, V {V}, {DTYPES[device]}; this machine: "
        f"{flops / 1e12:.3g} TFLOP/s in a matrix product, {bandwidth / 1e9:.3g} GB/s in a copy"
    )
    rows = measure(size, device, rounds, heads)
    _, first_memory, first_times = rows[0]
    header = ("s", "x first", "TFLOP/s", "GB/s", "roofline", "reached", "MB more", "x first")
    for backward in (False, True):
        title = "forward and backward" if backward else "forward"
        print(f"\n{title:31}" + "".join(f"{x:>10}" for x in header))
        for case, memory, times in rows:
            pairs = zip(times[backward], first_times[backward], strict=True)
            t, slower = (
                statistics.median(times[backward]),
                statistics.median(a / b for a, b in pairs),
            )
            work = 2 * M * D * V * ((3 + case.recomputes) if backward else 1)
            moved = (M + V) * D * DTYPES[device].itemsize * (3 if backward else 1)
            roofline = max(work / flops, moved / bandwidth)
            columns = (t, slower, work / t / 1e12, moved / t / 1e9, roofline, roofline / t)
            columns += (memory[backward] / 1e6, memory[backward] / first_memory[backward])
            print(f"{case.name:31}" + "".join(f"{x:10.4g}" for x in columns))


def recipe_size(path: str) -> tuple[int, int, int]:
    """M, D and V of a training run: its micro-batch and its model's configuration."""
    import yaml
    from transformers import AutoConfig

    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"error: --recipe {path} cannot be read: {error}") from None
    if missing := {"model", "max_tokens_per_micro_batch"} - recipe.keys():
        raise SystemExit(
            f"error: {path} does not set {', '.join(sorted(missing))}; use --sizes M,D,V."
        )
    config = AutoConfig.from_pretrained(recipe["model"])
    return recipe["max_tokens_per_micro_batch"], config.hidden_size, config.vocab_size


def main() -> None:
    """Command line entry."""

    def size(text: str) -> tuple[int, int, int]:
        found = re.fullmatch(r"([1-9]\d*),([1-9]\d*),([1-9]\d*)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not M,D,V: three numbers above 0")
        return tuple(map(int, found.groups()))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", type=size, metavar="M,D,V")
    parser.add_argument("--recipe", help="recipe whose sizes to take")
    parser.add_argument("--rounds", type=int, default=5, help="times each head is timed")
    parser.add_argument("--heads", nargs="+", help="names from the first column; default all")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = [case.name for case in cases(device)]
    if unknown := set(args.heads or ()) - set(known):
        parser.error(f"--heads {' '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if args.rounds < 1:
        parser.error("--rounds must be above 0")
    sizes = args.sizes or ([recipe_size(args.recipe)] if args.recipe else SIZES[device])
    if args.memory_of:
        print_own_extra_memory(args.memory_of, sizes[0], args.backward)
        return
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads")
    check(device)
    for each in sizes:
        report(each, device, args.rounds, args.heads)


if __name__ == "__main__":
    main()
