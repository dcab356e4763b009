"""Several processes (gloo, CPU) give the one-process run: tokens, losses, gradients, weights."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distributed
from model import Transformer

FLAGS = "--prompts-per-step 5 --group-size 3 --max-response-tokens 40 --reward random "
FLAGS += (
    "--steps 2 --num-critic-only-steps 1 --lr 1e-5 --critic-lr 1e-5 --critic-lr-warmup-steps 0 "
)
FLAGS += "--log-samples -1 --save-every 0 --max-refills 9 "
FLAGS += "--max-tokens-per-micro-batch 300 --eval-data "


def start(folder, nproc, *flags):
    command = [sys.executable, "train.py", "--output-dir", str(folder), *FLAGS.split(), "", *flags]
    return subprocess.Popen(
        [*command, f"--nproc={nproc}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output[-3000:]
    assert "UserWarning" not in output, output[-3000:]
    return output


# A rank fills its slots with its own share; the mismatch is rounding.
OF_THE_MACHINE = ("perf/", "mismatch", "slot_occupancy")


def read(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    for nproc in (1, 2, 3):  # one after the other: the machine may have two cores
        finish(start(base / str(nproc), nproc))
    return {nproc: base / str(nproc) for nproc in (1, 2, 3)}


@pytest.mark.parametrize("nproc", [2, 3])
def test_ranks_sample_the_same_tokens(folders, nproc):
    keys = ("step", "problem_id", "sample_index", "response_ids", "reward")
    rows = [
        [{k: row[k] for k in keys} for row in read(folders[n], "rollouts.jsonl")]
        for n in (1, nproc)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("nproc", [2, 3])
def test_s1_ranks_change_no_loss_gradient_or_weight(folders, nproc):
    """15 responses on 2 and 3 processes with unequal work, a critic-only step and a policy step."""
    for one, many in zip(*(read(folders[n], "metrics.jsonl") for n in (1, nproc)), strict=True):
        for name, value in one.items():
            if isinstance(value, float) and not any(x in name for x in OF_THE_MACHINE):
                assert many[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (one["step"], name)
    for part in ("policy", "critic"):
        a, b = (
            load_file(folders[n] / "checkpoints/step_000002" / part / "model.safetensors")
            for n in (1, nproc)
        )
        # lr 1e-5: of a gradient that is all rounding, Adam makes a part of that step.
        assert max((a[k] - b[k]).abs().max().item() for k in a) < 2e-6


def test_a_run_of_two_ranks_resumes_on_one(folders):
    finish(start(folders[2], 1, "--steps", "3", "--resume"))
    rows = read(folders[2], "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    one = folders[1]
    finish(start(one, 1, "--steps", "3", "--resume"))
    assert read(one, "metrics.jsonl")[2]["policy/loss"] == pytest.approx(
        rows[2]["policy/loss"], abs=1e-5
    )
    a, b = (
        load_file(f / "checkpoints/step_000003/policy/model.safetensors") for f in (one, folders[2])
    )
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 2e-6
    assert torch.isfinite(torch.cat([w.flatten() for w in a.values()])).all()


def spawn(worker, ranks, *args):
    """Run worker(rank, *args) on so many ranks of one process group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(in_group, (store.port, ranks, worker, args), ranks)


def in_group(rank, port, ranks, worker, args):
    """One rank of `spawn`, which leaves the group even if the worker raises."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test holds the store, not rank 0
    torch.set_num_threads(1)
    with distributed.joined("cpu"):
        worker(rank, *args)
    # torch's caches of sharded tensors keep gloo's threads alive after the group was left, and they
    # can abort the interpreter while it shuts down.
    sys.stdout.flush()
    os._exit(0)


def bf16_step(rank, folder, ranks):
    """One forward and backward of the same sequence on every rank, in bf16; keeps what came out."""
    from config import Config
    from run import setup

    policy = Transformer.from_pretrained(ROOT / "assets/tiny-base", compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "norm" in name:  # weights that bfloat16 cannot hold
                p += torch.linspace(0, 0.01, len(p))
    config = Config(dtype="bfloat16", activation_checkpointing=True)
    policy = setup.prepare(policy, torch.device("cpu"), config)
    ids = torch.arange(40) % 60
    index, targets = torch.arange(39), ids[1:]
    logprobs, _ = policy(ids, torch.tensor([0, 40], dtype=torch.int32), index, targets)
    # Every rank holds the same sequence, so each counts for its share.
    distributed.backward(-logprobs.mean() / ranks)
    gradients = {n: distributed.full(p.grad) for n, p in policy.named_parameters()}
    if rank == 0:
        torch.save((logprobs.detach(), gradients), folder / f"{ranks}.pt")


def test_two_ranks_compute_in_bf16_what_one_computes(tmp_path):
    """Norm weights rounded alike, embedding and head gradients not rounded at all."""
    for ranks in (1, 2):
        spawn(bf16_step, ranks, tmp_path, ranks)
    (one, gradients), (two, sharded) = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert torch.equal(one, two)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (ValueError("what to do"), "error: what to do"),
        (FloatingPointError("step 2"), "error: step 2"),
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(3), 3),
    ],
)
def test_a_command_ends_with_one_sentence(fault, end):
    with pytest.raises(SystemExit) as left, distributed.command("stopped"):
        raise fault
    assert left.value.code == end


def worker_that_raises(rank):
    raise RuntimeError("the cause")


def test_a_rank_that_raises_tells_its_cause():
    """A live process group could abort the interpreter before the cause was passed on."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the cause"):
        spawn(worker_that_raises, 2)


def test_a_command_leaves_the_process_group_however_it_ends(monkeypatch):
    for end in (SystemExit(3), None):
        left = []
        monkeypatch.setattr(distributed, "shutdown", lambda left=left: left.append(True))
        with pytest.raises(SystemExit) if end else nullcontext(), distributed.command("stopped"):
            if end:
                raise end
        assert left == [True]


def test_ranks_that_fail_together_share_no_line(monkeypatch):
    """Under PYTHONUNBUFFERED print writes the end of a line by itself, and ranks came between."""
    writes = []
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    with pytest.raises(SystemExit):
        distributed.exit_with("error: what to do")
    assert writes == ["rank 0: error: what to do\n"]


def test_a_fault_of_the_code_is_no_sentence():
    with pytest.raises(ZeroDivisionError), distributed.command("stopped"):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("world", "expected"),
    [(None, 8), ("1", 8), ("2", 0)],
    ids=["python train.py", "torchrun train.py", "torchrun --nproc-per-node 2 train.py"],
)
def test_nproc_starts_its_ranks_unless_a_launcher_has_started_several(world, expected, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    started = []

    class Ended:
        returncode = 0

        def __init__(self, command, env, **_):
            started.append((env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]))

        def poll(self):
            return 0

    monkeypatch.setattr(distributed.subprocess, "Popen", Ended)
    monkeypatch.setattr(distributed.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) if expected else nullcontext():
        distributed.launch(8)
    assert started == [(str(r), str(r), "8") for r in range(expected)]


@pytest.mark.parametrize(
    ("world", "local", "refused"),
    [(None, None, True), ("1", "1", True), ("4", "4", False), ("16", "8", True), ("8", "4", False)],
    ids=["python train.py", "one of torchrun", "torchrun 4", "torchrun 8 a node", "two nodes"],
)
def test_torchruns_own_number_of_processes_needs_the_devices(world, local, refused, monkeypatch):
    """A recipe for 8 processes was refused under torchrun --nproc-per-node 4 on four GPUs."""
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="--nproc 8.*4 CUDA") if refused else nullcontext():
        assert distributed.choose_device("auto", 8) == "cuda"


def muon_step(rank, file):
    """One of two ranks: a Muon step on a sharded matrix, the result in `file`."""
    weight, gradient = torch.load(f"{file}.in")
    mesh = init_device_mesh("cpu", (2,))
    sharded = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    torch.optim.Muon([sharded], lr=1.0, weight_decay=0).step()
    whole = sharded.detach().full_tensor()
    if rank == 0:
        torch.save(whole, file)


@pytest.mark.parametrize("shape", [(48, 33), (33, 48)])
def test_muon_orthogonalises_whole_matrices_and_not_the_shards_of_a_rank(tmp_path, shape):
    torch.manual_seed(0)
    weight, gradient = torch.randn(shape), torch.randn(shape)
    torch.save((weight, gradient), tmp_path / "w.in")
    spawn(muon_step, 2, tmp_path / "w")
    steps = {}
    for name, parts in {"whole": (gradient,), "shards": gradient.tensor_split(2)}.items():
        moved = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for parameter, part in zip(moved, parts, strict=True):
            parameter.grad = part
        torch.optim.Muon(moved, lr=1.0, weight_decay=0).step()
        steps[name] = torch.cat([p.detach() for p in moved])
    step = torch.load(tmp_path / "w") - weight
    error = {name: (step - other).norm() / step.norm() for name, other in steps.items()}
    # Newton-Schulz runs in bfloat16, so another order of summation shows.
    assert error["whole"] < 0.05 and error["shards"] > 0.3
