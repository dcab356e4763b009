"""Problems as a model sees them, its answers to them, and how many responses gave each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from curation.rows import RawProblem
from curation.state import StateFile
from data import Problem, Rollout
from model import local_folder
from problems import load_tokenizer, render_prompt, think_mode, with_suffix
from rollout import Sampler, evaluate
from run.scores import ANSWERED, Vote, count_votes
from verify import Verifier


def make_problem(number: int, row: RawProblem, tokenizer: Any, suffix: str) -> Problem:
    """A row as a model sees it. ValueError if its chat template refuses the prompt."""
    try:
        prompt = render_prompt(tokenizer, with_suffix(row.prompt, suffix))
    except TemplateError as error:
        sentence = f"{row.where}: the chat template refuses the prompt: {error}."
        raise ValueError(sentence) from error
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # Random numbers are keyed by the index. It is the row's number in the file, so dropping other
    # rows changes no sample.
    return Problem(str(number), number, prompt, ids, row.label)


@dataclass
class Solver:
    """Has models solve the rows; what the state file holds is not sampled again."""

    rows: Sequence[RawProblem]
    state: StateFile
    grader: Verifier
    device: torch.device
    dtype: torch.dtype
    slots: int  # responses decoded at the same time
    prompt_suffix: str
    think: str
    max_response_tokens: int

    def solve(
        self,
        left: Sequence[int],
        stage: str,
        model: str,
        *,
        samples: int,
        temperature: float,
        seed: int,
    ) -> dict[int, list[Vote]]:
        """Votes of a model on each row of `left`, from `samples` responses."""
        stage = f"{stage} by {model}"
        if not all(i in self.state.results[stage] for i in left):  # else no model is loaded
            self._sample(left, stage, model, samples, temperature, seed)
        done = self.state.results[stage]
        return {i: [Vote(*vote) for vote in done[i]] for i in left}

    def _sample(
        self,
        left: Sequence[int],
        stage: str,
        model: str,
        samples: int,
        temperature: float,
        seed: int,
    ) -> None:
        """Sample what is missing, chunk by chunk into the state file."""
        folder = local_folder(model)
        tokenizer = load_tokenizer(folder)
        sampler = Sampler.from_pretrained(folder, tokenizer, self.slots, self.dtype, self.device)
        problems = {i: make_problem(i, self.rows[i], tokenizer, self.prompt_suffix) for i in left}
        think = think_mode(self.think, list(problems.values()))
        for chunk in self.state.missing(stage, left):
            groups = evaluate(
                sampler,
                self.grader,
                [problems[i] for i in chunk],
                samples=samples,
                max_new_tokens=self.max_response_tokens,
                temperature=temperature,
                think=think,
                seed=seed,
            )
            votes = [votes_of(group, self.grader) for group in groups]
            self.state.add(stage, dict(zip(chunk, votes, strict=True)))


def votes_of(group: Sequence[Rollout], grader: Verifier) -> list[Vote]:
    """Answers of graded responses to one problem, the most frequent first."""
    answers = [r.answer if r.reason in ANSWERED else None for r in group]
    right = [int(r.correct) for r in group]
    is_right = dict(zip(answers, right, strict=True))

    def equal(a: str, b: str) -> bool:
        # Right answers equal the label and so each other: only wrong ones need the grader.
        return is_right[a] == is_right[b] and (is_right[a] or grader.equal(a, b))

    return count_votes(answers, right, equal)


def share_right(votes: Sequence[Vote], samples: int) -> float:
    """Share of the `samples` responses that equal the label."""
    return sum(vote.count * vote.right for vote in votes) / samples
