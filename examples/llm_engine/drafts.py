"""Drafts for speculative decoding: guesses at the next tokens, which the target verifies at once.

A draft always proposes exactly ``k`` tokens, however bad, so that all requests have the same number
of tokens and the step stays uniform decode. A guess costs nothing but acceptance: what is not the
target's own choice is thrown away.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import torch

from cgcompile.serving import Batch
from llm_engine.runner import Runner
from llm_engine.scheduler import Request

LONGEST_MATCH = 3  # tokens that an n-gram draft compares at most


class Draft(Protocol):
    """What proposes tokens."""

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        """[R, k] int64, on whatever device."""
        ...

    def saw(self, prompts: Batch) -> None:
        """The target has run chunks of prompts; a draft with a cache of its own must as well."""
        ...


class RandomDraft:
    """Any tokens: what speculation costs where nothing is accepted."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._seed = vocab, seed

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        rows = []
        for request in requests:  # by request and place, so that a preemption changes nothing
            source = random.Random(f"{self._seed} {request.number} {len(request.tokens)}")
            rows.append([source.randrange(self._vocab) for _ in range(k)])
        return torch.tensor(rows)

    def saw(self, prompts: Batch) -> None:
        pass


class NgramIndex:
    """Where the n-grams of one request ended last; grows with its tokens."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """What followed the longest suffix that was seen before, else the last token again."""
        self._learn(tokens)
        follow = len(tokens) - 1
        for length in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                follow = end + 1
                break
        guesses: list[int] = []
        for position in range(follow, follow + k):  # behind the end a cycle goes on
            guesses.append(
                tokens[position] if position < len(tokens) else guesses[position - len(tokens)]
            )
        return guesses

    def _learn(self, tokens: Sequence[int]) -> None:
        """All n-grams that end before the last token: the suffix itself is no match."""
        for end in range(self._known, len(tokens) - 1):
            for length in range(1, min(LONGEST_MATCH, end + 1) + 1):
                self._ends[tuple(tokens[end + 1 - length : end + 1])] = end
        self._known = max(self._known, len(tokens) - 1)


class NgramDraft:
    """The tokens that followed the same few tokens before, in the prompt or the output."""

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        rows = []
        for request in requests:
            index = self._indices.setdefault(request.number, NgramIndex())
            rows.append(index.propose(request.tokens, k))
        return torch.tensor(rows)

    def saw(self, prompts: Batch) -> None:
        pass


class ModelDraft:
    """A smaller model, with a manager and caches of its own, in the blocks of the target.

    A proposal leaves in its cache all tokens but the newest, and its own guesses but the last; of
    these the target takes a front. So when the next proposal begins, at most the last two tokens
    are missing there. It always feeds these two, which is uniform decode of length two; where the
    first was there already, it is written again. Single tokens follow, which stay on the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        model, rows = self._runner.model, [each.table.row for each in requests]
        ids = torch.tensor([token for each in requests for token in each.tokens[-2:]])
        starts = [len(each.tokens) - 2 for each in requests]
        hidden = self._runner.run(self._runner.decoding(ids, starts, 2, rows))
        guesses = [model.greedy(hidden[1::2])]
        for step in range(1, k):
            starts = [len(each.tokens) - 1 + step for each in requests]
            hidden = self._runner.run(self._runner.decoding(guesses[-1], starts, 1, rows))
            guesses.append(model.greedy(hidden))
        return torch.stack(guesses, 1)

    def saw(self, prompts: Batch) -> None:
        self._runner.run(prompts)
