"""The tokens that drafts propose, and which of them are accepted."""

from typing import Any

import pytest
import torch
from lib.examples import runner, serve, tiny_llama, workload
from llm_engine.drafts import ModelDraft, NgramDraft, NgramIndex, RandomDraft
from llm_engine.engine import Engine
from llm_engine.scheduler import Request


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),  # goes round behind the end
        ([1, 2, 9, 5, 2, 8, 1, 2], [9, 5, 2, 8]),  # the longer match, not the later one
        ([5, 1, 5, 2, 5], [2, 5, 2, 5]),  # the latest one of its length
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], [3, 3, 3, 3]),  # no match
        ([6], [6, 6, 6, 6]),
    ],
)
def test_ngrams(tokens: list[int], expected: list[int]) -> None:
    assert NgramIndex().propose(tokens, 4) == expected
    grown = NgramIndex()
    for end in range(1, len(tokens)):
        grown.propose(tokens[:end], 2)
    assert grown.propose(tokens, 4) == expected


def test_ngrams_of_requests_are_their_own() -> None:
    draft = NgramDraft()
    requests = [Request(0, [1, 2, 3, 1], 5), Request(1, [1, 7, 1], 5)]
    for _ in range(2):
        assert draft.propose(requests, 2).tolist() == [[2, 3], [7, 1]]
    assert draft.propose(requests[1:], 2).tolist() == [[7, 1]]


def test_random_drafts_depend_on_request_and_place_alone() -> None:
    requests = [Request(0, [1, 2], 5), Request(1, [1, 2], 5)]
    tokens = RandomDraft(100, 3).propose(requests, 4)
    assert tokens.shape == (2, 4)
    assert not torch.equal(tokens[0], tokens[1])
    assert torch.equal(RandomDraft(100, 3).propose(requests[1:], 4)[0], tokens[1])
    requests[0].accept([3])
    assert not torch.equal(RandomDraft(100, 3).propose(requests, 4)[0], tokens[0])


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_with_the_weights_of_the_target_is_always_right(
    k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own cache follows prefill in chunks, mixed steps and preemption."""
    verify, wrong = Engine._verify, []

    def checked(self: Any, request: Request, chosen: list[int], guesses: list[int]) -> None:
        if guesses != chosen[: len(guesses)]:
            wrong.append((request.number, chosen, guesses))
        verify(self, request, chosen, guesses)

    monkeypatch.setattr(Engine, "_verify", checked)
    target, small = tiny_llama(device), tiny_llama(device)
    draft = runner(small, "breakable", [1, 2])
    served = serve(target, workload(), draft=ModelDraft(draft), k=k)
    assert wrong == []
    assert served.engine.drafted.proposed > 25
    assert (
        served.engine.drafted.accepted > 0.6 * served.engine.drafted.proposed
    )  # the rest is cut off
    assert served.engine.scheduler.pressure.preemptions > 0
    assert served.engine.mixed_steps > 0
    assert draft.tally.uniform_full == draft.tally.uniform > 0
    assert draft.replays == draft.tally.steps


@pytest.mark.slow
def test_drafts_and_draft_tokens_go_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        serve(tiny_llama("cpu"), workload(), draft=NgramDraft(), k=0)
