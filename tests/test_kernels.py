"""The fused head against float64, closed forms and the bugs other projects had.

One set of tests for all implementations. This process runs "reference" and "torch" on the CPU and,
where there is a GPU, "torch" and "triton" on it. The Triton kernels run on the CPU in a second
pytest process with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

import math
import os
import re
import subprocess
import sys

import numpy
import pytest
import torch
from helpers import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import chunked, logprob_entropy, reference

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
TARGETS = [("triton", "cpu")] if INTERPRET else [("reference", "cpu"), ("torch", "cpu")]
if torch.cuda.is_available() and not INTERPRET:
    TARGETS += [("torch", "cuda"), ("triton", "cuda")]


@pytest.fixture(params=TARGETS, ids="-".join)
def head(request):
    """(function, device): `logprob_entropy` fixed to one implementation."""
    impl, device = request.param

    def run(*args, **options):
        return logprob_entropy(*args, impl=impl, **options)

    run.impl, run.device = impl, device
    return run


def problem(M, V, D, std=1.0, dtype=torch.float32, device="cpu", seed=0):
    """Leaves (hidden, weight, bias) whose logits have about this std, targets, upstream gradients.

    The first target is the last column, which lies in the ragged tile.
    """
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, D, generator=g)
    weight = torch.randn(V, D, generator=g) * std / math.sqrt(D)
    bias = torch.randn(V, generator=g) * std / 4
    targets = torch.randint(0, V, (M,), generator=g)
    targets[0] = V - 1
    upstream = torch.randn(2, M, generator=g)
    leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves, targets.to(device), upstream.to(device)


def float64(leaves, targets, upstream, temperature=1.0):
    """Outputs, gradients and logits by autograd over the definition in float64."""
    hidden, weight, bias = [x.detach().double().requires_grad_() for x in leaves]
    z = (hidden @ weight.T + bias) / temperature
    logp = z - torch.logsumexp(z, 1, keepdim=True)
    outputs = (logp[torch.arange(len(z)), targets], -(torch.softmax(z, 1) * logp).sum(1))
    total = sum((u * x).sum() for u, x in zip(upstream, outputs, strict=True))
    return outputs, torch.autograd.grad(total, (hidden, weight, bias)), z.detach()


def run(head, leaves, targets, upstream, temperature=1.0):
    hidden, weight, bias = leaves
    outputs = head(hidden, weight, targets, bias=bias, temperature=temperature)
    total = sum((u * x).sum() for u, x in zip(upstream, outputs, strict=True))
    return outputs, torch.autograd.grad(total, leaves)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def assert_right(head, case, temperature=1.0):
    """Outputs within 2e-6 (1 + max |z|), gradients within 1e-5 in float32 and 4e-3 in bf16.

    On a GPU, whose sums run in another order and whose dlogits are bf16: 1e-4 and 6e-3.
    """
    outputs, grads = run(head, *case, temperature)
    want_outputs, want_grads, z = float64(*case, temperature)
    gpu, rounded = head.device == "cuda", case[0][0].dtype != torch.float32
    bound = max(1e-4 * gpu, 2e-6 * (1 + z.abs().max().item()))
    for got, want in zip(outputs, want_outputs, strict=True):
        assert got.dtype == torch.float32
        assert (got.double() - want).abs().max() < bound
    for got, want in zip(grads, want_grads, strict=True):
        assert error(got, want) < ((6e-3 if gpu else 4e-3) if rounded else 1e-5)


SHAPES = [
    # M, V, D, logit std, temperature
    (1, 64, 32, 1.0, 1.0),
    (7, 130, 33, 0.01, 0.5),
    (129, 1000, 64, 4.0, 2.0),
    (129, 1023, 96, 1.0, 0.6),
    (7, 1025, 64, 12.0, 1.7),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("M, V, D, std, temperature", SHAPES)
def test_outputs_and_gradients_agree_with_float64(head, M, V, D, std, temperature, dtype):
    assert_right(head, problem(M, V, D, std, dtype, head.device), temperature)


@pytest.mark.parametrize("std", [1.0, 4.0, 8.0])
def test_vocabulary_of_130560_in_bf16(head, std, monkeypatch):
    if INTERPRET:  # few wide tiles: the interpreter's cost is per operation
        monkeypatch.setitem(logprob.BLOCKS, "fp32", (16, 4096, 16, 4, 2, True))
    case = problem(3, 130_560, 16, std, torch.bfloat16, head.device)
    assert_right(head, case)
    hidden, weight, bias = case[0]
    outputs = head(hidden, weight, case[1], bias=bias)
    for got, want in zip(outputs, float64(*case)[0], strict=True):
        assert (got.double() - want).abs().max() < (1e-4 if head.device == "cuda" else 2e-5)


@pytest.mark.parametrize("gradient_of", ["logprobs", "entropy"])
def test_gradient_of_one_output_alone(head, gradient_of):
    leaves, targets, upstream = problem(7, 130, 16, device=head.device)
    upstream[0 if gradient_of == "entropy" else 1] = 0
    want = float64(leaves, targets, upstream)[1]
    logprobs, entropy = head(leaves[0], leaves[1], targets, bias=leaves[2])
    total = (upstream[1] * entropy if gradient_of == "entropy" else upstream[0] * logprobs).sum()
    for got, w in zip(torch.autograd.grad(total, leaves), want, strict=True):
        assert error(got, w) < 1e-5


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_one_input_does_not_require_grad(head, frozen):
    leaves, targets, upstream = problem(7, 130, 16, device=head.device)
    want = float64(leaves, targets, upstream)[1]
    index = ("hidden", "weight", "bias").index(frozen)
    leaves[index].requires_grad_(False)
    outputs = head(leaves[0], leaves[1], targets, bias=leaves[2])
    sum((u * x).sum() for u, x in zip(upstream, outputs, strict=True)).backward()
    assert leaves[index].grad is None
    for i, leaf in enumerate(leaves):
        assert i == index or error(leaf.grad, want[i]) < 1e-5


def test_tied_embedding_gets_the_gradient_of_both_uses(head):
    leaves, targets, upstream = problem(40, 65, 16, device=head.device)
    ids = torch.arange(40, device=head.device) % 65
    grads = []
    for weight in (leaves[1].detach(), leaves[1].detach().double()):
        weight.requires_grad_()
        if weight.dtype == torch.float64:
            logp = torch.log_softmax(weight[ids] @ weight.T, 1)
            outputs = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
        else:
            outputs = head(weight[ids], weight, targets)
        total = sum((u * x).sum() for u, x in zip(upstream, outputs, strict=True))
        grads += torch.autograd.grad(total, weight)
    assert error(*grads) < 1e-5


def test_float32_master_weight_gets_an_unrounded_gradient(head):
    if head.impl == "reference":
        pytest.skip("autograd rounds it on its way through the cast")
    (hidden, weight, bias), targets, upstream = problem(33, 130, 16, device=head.device)
    hidden = hidden.detach().bfloat16().requires_grad_()
    rounded = [hidden, weight.detach().bfloat16(), bias]
    want = float64(rounded, targets, upstream)[1]
    grads = run(head, [hidden, weight, bias], targets, upstream)[1]
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]
    assert error(grads[1], want[1]) < (6e-3 if head.device == "cuda" else 1e-5)


# --- bugs met elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-10.0, -50.0, -100.0, -1000.0])
def test_a_constant_added_to_all_logits_changes_nothing(head, shift):
    """Columns beyond V taken for logits of 0, or a running max that starts at 0, beat low ones."""
    leaves, targets, upstream = problem(7, 1000, 16, device=head.device)
    want_outputs, want_grads, _ = float64(leaves, targets, upstream)
    shifted = [leaves[0], leaves[1], (leaves[2].detach() + shift).requires_grad_()]
    outputs, grads = run(head, shifted, targets, upstream)
    ulp = 2e-6 * (1 + abs(shift))  # the shifted logits themselves are rounded to this
    for got, want in zip(outputs, want_outputs, strict=True):
        assert (got.double() - want).abs().max() < ulp
    for got, want in zip(grads, want_grads, strict=True):
        assert error(got, want) < 1e-5 + ulp


def test_equal_weight_rows_give_the_uniform_distribution(head):
    V = 1023
    hidden = torch.randn(7, 16, device=head.device).requires_grad_()
    weight = torch.linspace(-1, 1, 16, device=head.device).repeat(V, 1)
    targets = torch.arange(7, device=head.device) * 170 + 2
    logprobs, entropy = head(hidden, weight, targets)
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(V)), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(V)), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    assert grad.abs().max() < 1e-5


def test_vocabulary_of_one_is_certain_and_has_no_gradient(head):
    leaves, targets, upstream = problem(3, 1, 16, device=head.device)
    outputs, grads = run(head, leaves, targets, upstream)
    assert all(not x.any() for x in outputs + grads)


def test_gradient_of_the_logits_sums_to_zero(head):
    leaves, targets, upstream = problem(1, 1025, 16, device=head.device)
    dlogits = run(head, leaves, targets, upstream)[1][2]  # with one row, the gradient of the bias
    assert abs(dlogits.double().sum()) < 1e-6 * dlogits.double().abs().sum()


def test_repeated_targets_accumulate(head):
    leaves, _, upstream = problem(129, 64, 16, device=head.device)
    targets = torch.full((129,), 3, device=head.device)
    assert_right(head, (leaves, targets, upstream))


def test_confident_rows_have_entropy_zero_not_nan(head):
    leaves, targets, _ = problem(7, 130, 16, std=300.0, device=head.device)
    logprobs, entropy = head(leaves[0], leaves[1], targets)
    grads = torch.autograd.grad((logprobs + entropy).sum(), leaves[:2])
    assert all(x.isfinite().all() for x in (logprobs, entropy, *grads))
    assert entropy.min() >= -1e-5 and entropy.median() < 1e-3


def test_strided_inputs(head):
    """Columns of a wider matrix, every second target, a stride-0 gradient from sum()."""
    leaves, targets, _ = problem(16, 130, 16, device=head.device)
    hidden, weight, bias = (x.detach() for x in leaves)
    strided = (
        torch.cat([hidden, hidden], 1)[:, :16],
        weight.T.contiguous().T,
        torch.stack([bias, bias], 1)[:, 0],
    )
    assert not any(x.is_contiguous() for x in strided)
    strided = [x.requires_grad_() for x in strided]
    y = torch.stack([targets, targets], 1)[:, 0]
    total = sum(x.sum() for x in head(strided[0], strided[1], y, bias=strided[2]))
    want = float64(leaves, targets, torch.ones(2, 16, device=head.device))[1]
    for got, w in zip(torch.autograd.grad(total, strided), want, strict=True):
        assert error(got, w) < 1e-5


def test_ignored_rows_are_zero_without_gradient_even_if_nan(head):
    leaves, targets, upstream = problem(9, 130, 16, device=head.device)
    want_outputs, want_grads, _ = float64(leaves, targets, upstream)
    hidden = torch.full((11, 16), math.nan, device=head.device)
    y = torch.full((11,), -100, device=head.device)
    rows = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 10])
    hidden[rows], y[rows] = leaves[0].detach(), targets
    hidden.requires_grad_()
    upstream_all = torch.ones(2, 11, device=head.device)
    upstream_all[:, rows] = upstream
    outputs, grads = run(head, [hidden, *leaves[1:]], y, upstream_all)
    for got, want in zip(outputs, want_outputs, strict=True):
        assert not got[[3, 9]].any()
        assert (got[rows].double() - want).abs().max() < 1e-5
    assert not grads[0][[3, 9]].any()
    assert error(grads[0][rows], want_grads[0]) < 1e-5
    assert error(grads[1], want_grads[1]) < 1e-5


@pytest.mark.parametrize("M", [0, 5])
def test_no_rows_left_gives_zero_gradients(head, M):
    leaves, _, _ = problem(5, 64, 16, device=head.device)
    hidden, weight = leaves[0].detach()[:M].requires_grad_(), leaves[1]
    logprobs, entropy = head(hidden, weight, torch.full((M,), -1, device=head.device))
    assert logprobs.shape == entropy.shape == (M,)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert grads[0].shape == (M, 16) and not any(g.any() for g in grads)


def test_a_nan_row_shows_and_stays_alone(head):
    leaves, targets, _ = problem(5, 130, 16, device=head.device)
    hidden = leaves[0].detach().clone()
    hidden[2, 3] = math.nan
    for out in head(hidden, leaves[1], targets):
        assert out.isnan().tolist() == [False, False, True, False, False]


def test_same_inputs_give_the_same_bits(head):
    case = problem(70, 1000, 16, device=head.device)
    first, second = run(head, *case), run(head, *case)
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b)


# --- memory -------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the most bytes that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.nbytes)
        return out


def test_no_tensor_of_rows_times_vocabulary_is_ever_made(head, monkeypatch):
    """Also the only test with several chunks, whose boundaries must not show in the result."""
    if head.impl == "reference":
        pytest.skip("the specification does write the logits out")
    M, V, D = 300, 1024, 16
    monkeypatch.setattr(chunked, "MIN_ROWS", 128)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", {head.device: 128 * V})
    if head.impl == "triton":
        monkeypatch.setattr("kernels.logprob.CHUNK_ELEMENTS", 128 * V)
    case = problem(M, V, D, device=head.device)
    with LargestTensor() as watch:
        run(head, *case)
    chunk = 4 * 128 * V
    assert chunk <= watch.largest <= 2 * chunk < 4 * M * V  # at most two buffers of one chunk
    assert_right(head, case)


# --- the specification and the choice of implementation -----------------------------------------


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradients_pass_finite_differences_in_float64(impl):
    (hidden, weight, bias), targets, _ = problem(5, 11, 4, dtype=torch.float64)

    def both(hidden, weight, bias):
        return logprob_entropy(hidden, weight, targets, bias=bias, temperature=0.7, impl=impl)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_reference_in_closed_form():
    """Logits (0, log 2, log 5): probabilities 1/8, 2/8, 5/8; at temperature 1/2 (1, 4, 25) / 30."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], dtype=torch.float64)
    hidden, targets = torch.ones(2, 1, dtype=torch.float64), torch.tensor([0, 2])
    for temperature, p in ((1.0, (1 / 8, 2 / 8, 5 / 8)), (0.5, (1 / 30, 4 / 30, 25 / 30))):
        logprobs, entropy = reference.logprob_entropy(hidden, weight, None, targets, temperature)
        assert logprobs.tolist() == pytest.approx([math.log(p[0]), math.log(p[2])])
        assert entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p)] * 2)


def test_bad_inputs_are_refused_with_a_sentence():
    hidden, weight, y = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2])
    cases = [
        ((hidden, torch.ones(5, 3), y), {}, r"must be \(M, D\) and \(V, D\)"),
        ((hidden, weight, y[:2]), {}, "one for each of 3"),
        ((hidden, weight, y.int()), {}, "must be int64"),
        ((hidden, weight, torch.tensor([0, 1, 5])), {}, "target 5: the vocabulary ends at 4"),
        ((hidden, weight, y), {"temperature": 0.0}, "temperature 0.0"),
        ((hidden, weight, y), {"temperature": math.nan}, "temperature nan"),
        ((hidden, weight, y), {"bias": torch.ones(4)}, "bias"),
        ((hidden, weight, y), {"impl": "fast"}, "choose auto, reference, torch or triton"),
        ((hidden.double(), weight, y), {"impl": "triton"}, "no float64"),
    ]
    for args, options, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            logprob_entropy(*args, **options)


@pytest.mark.skipif(INTERPRET, reason="here Triton does run on the CPU")
def test_triton_on_a_cpu_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        logprob_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2]), impl="triton")


def test_auto_logs_once_what_it_picked_and_does_not_warn_on_a_cpu(caplog):
    """Every rank wrote the line into the progress bar."""
    caplog.set_level("INFO")
    kernels._choose.cache_clear()
    hidden, weight, y = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, -100])
    for _ in range(3):
        logprob_entropy(hidden, weight, y)
    assert [r.getMessage() for r in caplog.records] == [
        "kernels: logprob_entropy runs as 'torch' (cpu, torch.float32)"
    ]
    assert caplog.records[0].levelname == "INFO"


def test_the_outputs_are_no_views():
    """FSDP2 warns on every rank of a module that returns one."""
    outputs = logprob_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2]))
    assert not any(x._is_view() for x in outputs)


@pytest.mark.skipif(INTERPRET, reason="nothing here depends on the implementation")
def test_works_without_triton_and_imports_it_only_for_the_kernel():
    code = """
import sys, torch
sys.modules["triton"] = None  # makes `import triton` fail
import kernels
assert "transformers" not in sys.modules and "kernels.logprob" not in sys.modules
kernels.logprob_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2]))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- the benchmark ------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRET, reason="nothing here depends on the implementation")
def test_the_benchmark_names_a_bad_flag(capsys, monkeypatch):
    """--sizes 10,10, --rounds 0 and --recipe /nope were tracebacks, --heads nope no table."""
    from kernels import bench

    for flags, words in (
        ("--sizes 10,10", "'10,10' is not M,D,V"),
        ("--sizes 0,0,0", "'0,0,0' is not M,D,V"),
        ("--rounds 0", "--rounds must be above 0"),
        ("--heads nope", "--heads nope: choose from naive,"),
        ("--recipe /nope", "--recipe /nope cannot be read"),
    ):
        monkeypatch.setattr("sys.argv", ["bench.py", *flags.split()])
        with pytest.raises(SystemExit) as error:
            bench.main()
        assert words in capsys.readouterr().err + str(error.value)


@pytest.mark.slow
def test_training_takes_a_sixth_of_the_naive_memory():
    command = [sys.executable, "kernels/bench.py", "--heads", "naive", "torch", "--rounds", "1"]
    command += ["--sizes", "2048,576,32768"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    table = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    rows = [line.split() for line in table.stdout.splitlines() if line.startswith("torch  ")]
    assert len(rows) == 2  # forward; forward and backward
    assert all(float(row[-1]) <= 1 / 6 for row in rows)


# --- the Triton kernels, interpreted ------------------------------------------------------------


def interpreter_is_broken():
    """Triton 3.6 converts loop bounds in a way that numpy 2.4 refuses."""
    triton = pytest.importorskip("triton")
    version = [tuple(map(int, m.__version__.split(".")[:2])) for m in (triton, numpy)]
    return version[0] < (3, 7) and version[1] >= (2, 4)


@pytest.mark.skipif(INTERPRET, reason="this is that process")
def test_triton_kernels_pass_all_of_this_in_the_interpreter():
    if interpreter_is_broken():
        pytest.skip("the interpreter of Triton 3.6 does not work with numpy 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 40


interpreted = pytest.mark.skipif(not INTERPRET, reason="runs in the interpreting process")
if INTERPRET:
    import triton
    import triton.language as tl

    from kernels import logprob

    @triton.jit
    def last_block(row_blocks, column_blocks, GROUP: tl.constexpr):
        return row_blocks - 1 + tl.program_id(0), column_blocks - 1 + tl.program_id(0)


@interpreted
@pytest.mark.parametrize("key", ["sm90", "sm80", "small"])
def test_every_tile_shape_gives_the_same_answer(head, key, monkeypatch):
    """By descriptors and by pointers, with splits that hold several tiles and a group cut short."""
    monkeypatch.setitem(logprob.BLOCKS, "small", (16, 64, 32, 4, 2, True))
    monkeypatch.setitem(logprob.BLOCKS, "fp32", logprob.BLOCKS[key])
    monkeypatch.setattr(logprob, "GROUP", 2)
    monkeypatch.setattr(logprob, "MIN_SPLITS", 3)
    assert_right(head, problem(70, 700, 20))


@interpreted
def test_addresses_beyond_2_to_the_31_elements(tmp_path, monkeypatch):
    """One program writes and one reads the end of a sparse 9 GB file: int32 would turn negative."""
    monkeypatch.setattr(logprob, "_place", last_block)
    M, wide, narrow = 8_500, 255_999, 16
    matrix = torch.from_file(str(tmp_path / "sparse"), shared=True, size=M * wide).view(M, wide)
    y, zero, one = torch.zeros(M, dtype=torch.int64), torch.zeros(M), torch.ones(M)

    tile = dict(BM=64, BV=128, BD=16, GROUP=16, DESCRIPTOR=False)
    h, w = torch.zeros(M, narrow), torch.zeros(wide, narrow)
    scale = 1.0
    logprob._dlogits[(1,)](
        h, w, None, y, zero, None, one, zero, matrix, M, wide, narrow, scale, **tile
    )
    assert matrix[-1].sum() == wide % 128 and matrix[-2, -1] == 1  # p = exp(0 - 0), times offset 1

    tile |= dict(BM=16, BD=8192)
    stats = torch.zeros(1, 4, M)
    w = torch.zeros(narrow, wide)
    w[3, -1] = 5
    logprob._forward[(1,)](matrix, w, None, y, stats, M, narrow, wide, scale, 1, **tile)
    assert stats[0, 0, -1] == 5  # the largest logit of the last row: 1 * 5
