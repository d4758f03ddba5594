"""Drafts for speculative decoding: guesses at the next tokens, which the target verifies at once.

A draft always proposes exactly ``k`` tokens, however bad, so that all requests have the same number
of tokens and the step stays uniform decode. A guess costs nothing but acceptance: what is not the
target's own choice is thrown away.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import torch

from llm_engine.runner import Runner, round_batch
from llm_engine.scheduler import Request, Work

LONGEST_MATCH = 3  # tokens that an n-gram draft compares at most


class Draft(Protocol):
    """What proposes tokens."""

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        """[R, 1 + k] int64, on whatever device: the newest token of each request, k guesses."""
        ...

    def follow(self, work: Sequence[Work], begin: torch.Tensor) -> None:
        """The target has run a step; the host does not wait for it yet.

        Args:
            work: of the step.
            begin: of :class:`llm_engine.epilogues.Choices`, a row for each item.
        """
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

    def follow(self, work: Sequence[Work], begin: torch.Tensor) -> None:
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

    def follow(self, work: Sequence[Work], begin: torch.Tensor) -> None:
        pass


class ModelDraft:
    """A smaller model, with managers and caches of its own, in the blocks of the target.

    A round begins while the host still waits for what the target chose: the target's graph has left
    on the device where it begins. So it drafts for requests that turn out to be done as well. It
    leaves in its cache the newest token and all its guesses; of these the target takes a front.
    What is behind it is written again in the next round.

    Args:
        prompts: runs chunks of prompts; started.
        rounds: runs rounds of drafts, see :class:`llm_engine.epilogues.DraftLoop`; started.
    """

    def __init__(self, prompts: Runner, rounds: Runner) -> None:
        self._prompts, self._rounds = prompts, rounds
        self._requests: list[Request] = []  # of the last round
        self._drafts = torch.empty(0, 0)  # of the last round, valid until the next one

    def follow(self, work: Sequence[Work], begin: torch.Tensor) -> None:
        """Run the prompts of a step, then a round of drafts: one graph."""
        prompts = [item for item in work if item.prefill]
        if prompts:
            self._prompts.run(self._prompts.batch(prompts))
        at = [index for index, item in enumerate(work) if item.samples]
        self._requests = [work[index].request for index in at]
        if self._requests:
            begin = begin if len(at) == len(work) else begin[on_device(at, begin)]
            rows = [request.table.row for request in self._requests]
            self._drafts = self._rounds.run(round_batch(begin, rows))

    def propose(self, requests: Sequence[Request], k: int) -> torch.Tensor:
        """Those of the last round, which began with all requests that decode now."""
        if self._drafts.shape[1] != 1 + k:
            raise ValueError(f"a round drafts {self._drafts.shape[1] - 1} tokens, not {k}")
        if [*map(id, requests)] == [*map(id, self._requests)]:
            return self._drafts
        known = {id(request): index for index, request in enumerate(self._requests)}
        at = [known[id(request)] for request in requests]
        return self._drafts[on_device(at, self._drafts)]


def on_device(indices: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Indices for a tensor, without a wait."""
    return torch.tensor(indices, dtype=torch.int64).to(like.device, non_blocking=True)
