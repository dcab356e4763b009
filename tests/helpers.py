"""What several test files need: runs of train.py in this process, graders that need no model, and
small tensors. No test file imports another one.
"""

import json
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from verify import Verdict

ROOT = Path(__file__).parent.parent


# ---- runs of train.py

SMALL = "--prompts-per-step 3 --group-size 4 --max-response-tokens 16 --log-samples -1".split()


class HashGrader:
    """A verifier that calls about half of all responses right, whatever the model says.

    An untrained model is never right, so without it no group would have a signal.
    """

    def __init__(self, num_workers, timeout_s):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, response, label, think="auto", kind="math"):
        future = Future()
        correct = sum(response.encode()) % 2 == 0
        future.set_result(Verdict(correct, "ok" if correct else "wrong", None))
        return future


def grade_by_hash(monkeypatch):
    """Let runs grade with HashGrader."""
    monkeypatch.setattr("run.setup.Verifier", HashGrader)


def draw_no_figures(monkeypatch):
    """Let runs end without their figures, which take longer than the steps of a small run."""
    monkeypatch.setattr("run.metrics.draw_figures", lambda folder: None)


def train_run(folder, *flags, model=None):
    """Train in this process; returns the rows of metrics.jsonl by step."""
    import train

    base = ["--output-dir", str(folder), "--eval-data", "", *SMALL]
    train.main([*base, *(["--model", str(model)] if model else []), *map(str, flags)])
    return read_metrics(folder)


def read_metrics(folder):
    """The rows of a run's metrics.jsonl by step."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows}


def weights(folder, step, part="policy"):
    """The weights of a checkpoint by name."""
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / part / "model.safetensors")


def same(a, b):
    """Whether two sets of weights are equal bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a, b):
    """Between two sets of weights."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---- groups of rollouts


class WordTokenizer:
    """64 tokens, each the word that is its id."""

    def get_vocab(self):
        return {str(i): i for i in range(64)}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class LengthGrader:
    """Right if the response has an even number of tokens: mixed groups, and independent of any
    text.
    """

    def __init__(self, verdict=lambda n: n % 2 == 0):
        self.verdict, self.graded = verdict, 0

    def submit(self, response, label, think="auto", kind="math"):
        self.graded += 1
        future = Future()
        correct = self.verdict(len(response.split()))
        future.set_result(Verdict(correct, "ok" if correct else "wrong", None))
        return future


def collect_config(**changes):
    """The fields of Config that `rollout.collect` reads."""
    fields = dict(
        prompts_per_step=4, group_size=4, over_sampling=1.0, max_refills=3,
        dynamic_sampling=True, seed=0, max_response_tokens=24, temperature=1.0,
        think="auto", partial_rollout=False, partial_mask_old=False, max_staleness=None,
        reward="correct",
    )  # fmt: skip
    return SimpleNamespace(**fields | changes)


def tokens(rollouts):
    return [r.response_ids for r in rollouts]


def policy_logprobs(policy, micro_batch, temperature=1.0):
    """(R, T) log-probs of the responses of a packed micro-batch, zero outside its mask."""
    mb = micro_batch
    logprobs, _ = policy(mb.input_ids, mb.cu_seqlens, mb.action_index, mb.targets, temperature)
    return mb.unpack(logprobs)


# ---- kernels that need a GPU


def flash_attn_stand_in():
    """The two functions of flash-attn that are used, by their documentation, in float64."""

    def attention(q, k_cache, v_cache, length, pages):
        share = q.shape[1] // k_cache.shape[2]
        k, v = (
            x[pages.long()].flatten(0, 1)[:length].repeat_interleave(share, 1).transpose(0, 1)
            for x in (k_cache.double(), v_cache.double())
        )
        seen = torch.ones(len(q), length, dtype=torch.bool).tril(length - len(q))
        out = F.scaled_dot_product_attention(q.double().transpose(0, 1), k, v, attn_mask=seen)
        return out.transpose(0, 1).to(q.dtype)

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
        assert (
            causal and q.shape[1] == 1 and cache_seqlens.dtype == block_table.dtype == torch.int32
        )
        rows = zip(q, cache_seqlens, block_table, strict=True)
        return torch.stack([attention(r, k_cache, v_cache, int(n), t) for r, n, t in rows])

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, causal, block_table):
        assert causal and cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
        parts = zip(q.split(cu_q.diff().tolist()), cu_k.diff(), block_table, strict=True)
        return torch.cat([attention(r, k, v, int(n), t) for r, n, t in parts])

    return SimpleNamespace(**locals())


# ---- processes


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid, seconds):
    """Wait until a process has ended; False if that takes longer."""
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


# ---- small tensors


def mask_of(lengths, width=None):
    """(N, T) bool: the first `lengths[i]` places of row i."""
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def rand(*shape, seed=0, dtype=torch.float32):
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
