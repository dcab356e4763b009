"""Tokens per second of the sampler beside `transformers` generate, in one process, both returning
log-probs.

    make bench-sampler

Models are random and lengths come from their own stop token, whose probability is 1 / 64. Every
round runs each contender once, in turn, because the load of a machine drifts; the table holds
medians of useful tokens (up to the stop token) per second of wall clock, and ratios per round.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from model import Transformer
from rollout import Sampler

TINY = dict(vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4)  # fmt: skip
SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
               num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
EOS = 2
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes/s, from the data sheets


class Case:
    """One load for both contenders: `prompts` x `n` responses on `slots` slots."""

    def __init__(self, name, model, *, prompts, n, slots, prompt, new, stops, device):
        self.name, self.n, self.slots, self.new = name, n, slots, new
        self.eos = [EOS] if stops else []
        torch.manual_seed(0)
        config = LlamaConfig(
            **model, tie_word_embeddings=True, max_position_embeddings=prompt + new,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.prompts = torch.randint(3, model["vocab_size"], (prompts, prompt)).tolist()
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(config).save_pretrained(folder)
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
            self.ours = Transformer.from_pretrained(folder, dtype).to(device).requires_grad_(False)
        self.device = device

    def run_ours(self, round_):
        """Useful tokens of all prompts, with what the sampler counted."""
        sampler = Sampler(self.ours, self.eos, self.slots)
        rollouts = sampler.generate(self.prompts, self.n, self.new, seed=round_)
        return sum(len(r.response_ids) for r in rollouts), sampler

    def run_theirs(self, round_, cache):
        """One static batch: as many rows as there are slots, to the end of the longest."""
        rows = [p for p in self.prompts for _ in range(self.n)]
        first = round_ * self.slots % len(rows)
        ids = torch.tensor(rows[first : first + self.slots], device=self.device)
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=self.new, eos_token_id=self.eos or None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            cache_implementation=cache,
        )  # fmt: skip
        torch.manual_seed(round_)
        out = self.theirs.generate(ids, config)
        new = out.sequences[:, ids.shape[1] :]
        torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[:, :, None])
        ended = (new == EOS) if self.eos else torch.zeros_like(new, dtype=torch.bool)
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
        return int(lengths.sum())


def timed(function, *args):
    """(result, wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def time_prefill(sampler_class):
    """Let every sampler count its seconds of prefill."""
    original = sampler_class._prefill

    def prefill(self, *args):
        _, seconds, _ = timed(original, self, *args)
        self.counts["prefill_s"] += seconds

    sampler_class._prefill = prefill


def compare(case, rounds):
    """One row of the table."""
    caches = {"dynamic": None, "static": "static"}
    rates, cpu = {name: [] for name in ["ours", *caches]}, {name: [] for name in ["ours", *caches]}
    for round_ in range(rounds):
        (tokens, sampler), wall, busy = timed(case.run_ours, round_)
        rates["ours"].append(tokens / wall)
        cpu["ours"].append(tokens / busy)
        for name, cache in caches.items():
            tokens, seconds, busy = timed(case.run_theirs, round_, cache)
            rates[name].append(tokens / seconds)
            cpu[name].append(tokens / busy)
    best = max(caches, key=lambda name: statistics.median(rates[name]))
    ratio = lambda xs: statistics.median(a / b for a, b in zip(xs["ours"], xs[best], strict=True))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    counts = sampler.counts
    occupancy = counts["row_steps"] / counts["decode_steps"] / case.slots
    print(
        f"{case.name:34} {middle['ours']:9.0f} {middle['dynamic']:9.0f} {middle['static']:9.0f} "
        f"{ratio(rates):6.2f} {ratio(cpu):6.2f} {occupancy:9.0%} {counts['prefill_s'] / wall:8.0%}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    time_prefill(Sampler)
    tiny = dict(model=TINY, slots=64, device=device)
    cases = {
        "tiny, skewed, prompts of 64": dict(tiny, prompts=32, n=8, prompt=64, new=256, stops=True),
        "tiny, skewed, prompts of 256": dict(
            tiny, prompts=32, n=8, prompt=256, new=256, stops=True
        ),
        "tiny, equal, 16 + 128": dict(tiny, prompts=64, n=1, prompt=16, new=128, stops=False),
        "135M shape, 8 rows, equal, 32 + 32": dict(
            model=SMOLLM2, slots=8, device=device, prompts=8, n=1, prompt=32, new=32, stops=False
        ),
    }
    print(
        f"{'useful tokens per second':34} {'ours':>9} {'dynamic':>9} {'static':>9} {'ratio':>6} "
        f"{'cpu':>6} occupancy  prefill"
    )
    for name, fields in cases.items():
        if args.only in name:
            compare(Case(name, **fields), args.rounds)


if __name__ == "__main__":
    main()
