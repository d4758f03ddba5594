"""Requests to serve: random prompts, and prompts that repeat themselves, for n-grams to guess."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from llm_engine.scheduler import Request

PATTERN = 4  # tokens of a prompt that repeats itself


@dataclass(frozen=True)
class Workload:
    """How requests look.

    Attributes:
        requests: how many; every other one has a prompt that repeats itself.
        prompt: tokens of the longest prompt; the shortest has a third of them.
        tokens: output of the longest request; the shortest has half of it.
        vocab: of the model.
        every: steps between arrivals, after the first few.
        at_once: requests that are there at the start.
        seed: of lengths and tokens.
        stop_tokens: of the model.
    """

    requests: int
    prompt: int
    tokens: int
    vocab: int
    every: float = 2.0
    at_once: int = 4
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def make(self) -> list[Request]:
        """Fresh requests, the same each time."""
        source = random.Random(self.seed)
        requests = []
        for number in range(self.requests):
            length = source.randint(max(1, self.prompt // 3), self.prompt)
            some = min(length, PATTERN) if number % 2 else length
            pattern = [source.randrange(self.vocab) for _ in range(some)]
            prompt = (pattern * (length // some + 1))[:length]
            arrival = int(max(0, number - self.at_once + 1) * self.every)
            tokens = source.randint(max(1, self.tokens // 2), self.tokens)
            requests.append(Request(number, prompt, tokens, arrival, self.stop_tokens))
        return requests


def scarce_blocks(requests: Sequence[Request], max_num_reqs: int, block_size: int, k: int) -> int:
    """Blocks of a cache in which the requests of a full step start, but do not all finish.

    Half of what the largest ones would need, but enough for any of them alone.
    """
    sizes = sorted((-(-(each.longest + k) // block_size) for each in requests), reverse=True)
    return 1 + max(sizes[0], sum(sizes[:max_num_reqs]) // 2)
