"""Tokens per second of the sampler next to `transformers` generate, in one process, both returning
log-probs.

    make bench-sampler

Models are random and lengths come from their own stop token, whose probability is 1 / 64. Every
round runs each contender once, in turn, because the load of a machine drifts; the table holds
medians of useful tokens (up to the stop token) per second of wall clock. Ratios are of ours to the
best of theirs (`generate` with a dynamic or static cache, `generate_batch`), by wall and CPU time.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

os.environ["TQDM_DISABLE"] = "1"
from kernels.attention import paged_kernel
from model import Transformer
from rollout import Sampler
from sampler.kvcache import bytes_per_token

TINY = dict(vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4)  # fmt: skip
SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
               num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
EOS = 2
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes/s, from the data sheets


class Case:
    """One load for all contenders: `n` responses to each of `prompts` prompts on `slots` slots."""

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
        graphs = self.device == "cuda" and paged_kernel() is not None
        sampler = Sampler(self.ours, self.eos, self.slots, cuda_graphs=graphs)
        rollouts = sampler.generate(self.prompts, self.n, self.new, seed=round_)
        return sum(len(r.response_ids) for r in rollouts), sampler

    def bytes_read(self, sampler):
        """Least traffic of our run: all weights in every decode step, the cache once per token."""
        weights = sum(p.numel() * p.element_size() for p in self.ours.parameters())
        token = bytes_per_token(self.ours.config, 2)  # bf16: this is for a GPU
        context = len(self.prompts[0]) + self.new / 4  # a typical length, on the low side
        return (
            sampler.counts["decode_steps"] * weights + sampler.counts["row_steps"] * context * token
        )

    def rows(self, round_):
        """As many prompts as there are slots, and the settings of `generate`."""
        rows = [p for p in self.prompts for _ in range(self.n)]
        first = round_ * self.slots % len(rows)
        torch.manual_seed(round_)
        settings = dict(do_sample=True, top_k=0, max_new_tokens=self.new, pad_token_id=0)
        return rows[first : first + self.slots], settings

    def run_static(self, round_, cache):
        """One static batch, to the end of the longest."""
        rows, settings = self.rows(round_)
        ids = torch.tensor(rows, device=self.device)
        config = GenerationConfig(
            **settings, eos_token_id=self.eos or None, output_logits=True,
            return_dict_in_generate=True, cache_implementation=cache,
        )  # fmt: skip
        out = self.theirs.generate(ids, config)
        new = out.sequences[:, ids.shape[1] :]
        # Part of the work, because ours returns log-probs too
        torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[:, :, None])
        # argmax finds the first stop token, but says 0 where there is none
        ended = (new == EOS) if self.eos else torch.zeros_like(new, dtype=torch.bool)
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
        return int(lengths.sum())

    def run_batching(self, round_):
        """Their continuous batching over as many requests as one static batch has rows."""
        rows, settings = self.rows(round_)
        sizes = {"return_logprobs": True}
        if self.device == "cpu":  # with the sizes it chooses by itself it takes minutes here
            pages = self.slots * (-(-(len(rows[0]) + self.new) // 256) + 1)
            sizes |= dict(num_blocks=pages, max_batch_tokens=4096, use_cuda_graph=False,
                          max_requests_per_batch=self.slots)  # fmt: skip
        config = GenerationConfig(**settings, eos_token_id=EOS if self.eos else -1)
        out = self.theirs.generate_batch(rows, config, ContinuousBatchingConfig(**sizes))
        return sum(len(answer.generated_tokens) for answer in out.values())


def timed(function, *args):
    """(result, wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*args)
    # A launch returns before the GPU has done the work
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
    contenders = {
        "ours": case.run_ours,
        "dynamic": lambda round_: case.run_static(round_, None),
        "static": lambda round_: case.run_static(round_, "static"),
        "batching": case.run_batching,
    }
    rates, cpu = ({name: [] for name in contenders} for _ in range(2))
    for round_ in range(rounds):
        for name, run in contenders.items():
            tokens, wall, busy = timed(run, round_)
            if name == "ours":
                (tokens, sampler), seconds = tokens, wall
            rates[name].append(tokens / wall)
            cpu[name].append(tokens / busy)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    best = max(list(contenders)[1:], key=middle.get)
    counts = sampler.counts
    # Rows alive in a decode step, as a share of the slots
    occupancy = counts["row_steps"] / counts["decode_steps"] / case.slots
    print(
        f"{case.name:34}"
        + "".join(f"{middle[name]:9.0f}" for name in contenders)
        + f"{ratio(rates, best):8.2f}"
        f"{ratio(cpu, best):7.2f}{occupancy:10.0%}{counts['prefill_s'] / seconds:9.0%}",
        flush=True,
    )
    if case.device == "cuda":
        share = case.bytes_read(sampler) / seconds / bandwidth()
        print(f"  at least {share:.0%} of the memory bandwidth")


def ratio(rates, other):
    """Median over the rounds of ours over another contender's."""
    return statistics.median(a / b for a, b in zip(rates["ours"], rates[other], strict=True))


def bandwidth():
    """Bytes per second of this GPU by its data sheet; NaN if it is not in the table."""
    name = torch.cuda.get_device_name()
    return next((rate for card, rate in BANDWIDTH.items() if card in name), float("nan"))


def main():
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    time_prefill(Sampler)
    tiny = dict(model=TINY, slots=64, device=device)
    cases = {
        "tiny, skewed, prompts of 64": dict(tiny, prompts=32, n=8, prompt=64, new=256, stops=True),
        "tiny, skewed, prompts of 256": dict(
            tiny, prompts=32, n=8, prompt=256, new=256, stops=True
        ),
        "tiny, equal, 8 x 8, 64 + 128": dict(tiny, prompts=8, n=8, prompt=64, new=128, stops=False),
        "tiny, equal, 64 x 1, 16 + 128": dict(
            tiny, prompts=64, n=1, prompt=16, new=128, stops=False
        ),
        "135M shape, 8 rows, equal, 32 + 64": dict(
            model=SMOLLM2, slots=8, device=device, prompts=8, n=1, prompt=32, new=64, stops=False
        ),
    }
    print(
        f"{'useful tokens per second':34}{'ours':>9}{'dynamic':>9}{'static':>9}{'batching':>9}"
        f"{'ratio':>8}{'cpu':>7} occupancy  prefill"
    )
    for name, fields in cases.items():
        if args.only in name:
            compare(Case(name, **fields), args.rounds)


if __name__ == "__main__":
    main()
