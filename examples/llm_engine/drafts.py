"""Drafts for speculative decoding: guesses at the next tokens, which the target verifies at once.

A draft always proposes exactly ``k`` tokens, however bad, so that all requests have the same number
of tokens and the step stays uniform decode. A guess costs nothing but acceptance: what is not the
target's own choice is thrown away.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import torch

from llm_engine.runner import Runner, paged_batch
from llm_engine.scheduler import Request, Work

LONGEST_MATCH = 3  # tokens that an n-gram draft compares at most


class Draft(Protocol):
    """What proposes tokens."""

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        """[R, 1 + k] int64, on whatever device: the newest token of each request, k guesses."""
        ...

    def saw(self, prompts: Sequence[Work]) -> None:
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
            rows.append(request.tokens[-1:] + [source.randrange(self._vocab) for _ in range(k)])
        return torch.tensor(rows)

    def saw(self, prompts: Sequence[Work]) -> None:
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
            rows.append(request.tokens[-1:] + index.propose(request.tokens, k))
        return torch.tensor(rows)

    def saw(self, prompts: Sequence[Work]) -> None:
        pass


class ModelDraft:
    """A smaller model, with managers and caches of its own, in the blocks of the target.

    A round leaves in its cache the newest token and all its guesses; of these the target takes a
    front. What is behind it is written again in the next round, which begins at the token after it.

    Args:
        prompts: runs chunks of prompts; started.
        rounds: runs rounds of drafts, see :class:`llm_engine.epilogues.DraftLoop`; started.
    """

    def __init__(self, prompts: Runner, rounds: Runner) -> None:
        self._prompts, self._rounds = prompts, rounds

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        """One graph; the tokens stay on the device, valid until the next proposal."""
        count = len(requests)
        newest = torch.tensor([request.tokens[-1] for request in requests])
        starts = [len(request.tokens) - 1 for request in requests]
        rows = [request.table.row for request in requests]
        size = self._rounds.model.block_size
        batch = paged_batch(newest, starts, [1] * count, rows, [False] * count, size)
        drafts = self._rounds.run(batch)
        if drafts.shape[1] != 1 + k:
            raise ValueError(f"a round drafts {drafts.shape[1] - 1} tokens, not {k}")
        return drafts

    def saw(self, prompts: Sequence[Work]) -> None:
        self._prompts.run(self._prompts.batch(prompts))
