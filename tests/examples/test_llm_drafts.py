"""The tokens that drafts propose, and which of them are accepted."""

from typing import Any

import pytest
import torch
from lib.examples import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    VOCABULARY,
    WIDTH,
    runner,
    serve,
    tiny_llama,
    workload,
)
from llm_engine.attention import PagedMetadata
from llm_engine.drafts import ModelDraft, NgramDraft, NgramIndex, RandomDraft
from llm_engine.engine import Engine
from llm_engine.epilogues import Choices, next_slots
from llm_engine.runner import paged_batch
from llm_engine.scheduler import Request, Work

from cgcompile import set_forward_context


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
        assert draft.propose(requests, 2).tolist() == [[1, 2, 3], [1, 7, 1]]
    assert draft.propose(requests[1:], 2).tolist() == [[1, 7, 1]]


def test_random_drafts_depend_on_request_and_place_alone() -> None:
    requests = [Request(0, [1, 2], 5), Request(1, [1, 2], 5)]
    tokens = RandomDraft(100, 3).propose(requests, 4)
    assert tokens.shape == (2, 5)
    assert tokens[:, 0].tolist() == [2, 2]  # the newest
    assert not torch.equal(tokens[0], tokens[1])
    assert torch.equal(RandomDraft(100, 3).propose(requests[1:], 4)[0], tokens[1])
    requests[0].accept([3])
    assert not torch.equal(RandomDraft(100, 3).propose(requests, 4)[0], tokens[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["breakable", "NONE"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_with_the_weights_of_the_target_is_always_right(
    k: int, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own cache follows prefill in chunks, mixed steps, preemption and accepted rounds."""
    verify, counts = Engine._verify, []

    def noted(self: Any, request: Request, choices: list[int], right: int) -> None:
        counts.append((right, len(choices) - 1))
        verify(self, request, choices, right)

    monkeypatch.setattr(Engine, "_verify", noted)
    target, small = tiny_llama(device), tiny_llama(device)
    prompts = runner(small, mode, [1])
    rounds = runner(small, mode, [1], drafts=k)
    served = serve(target, workload(), mode=mode, draft=ModelDraft(prompts, rounds), k=k)
    assert counts
    assert set(counts) == {(k, k)}
    drafted = served.engine.drafted
    assert drafted.rounds == len(counts)
    assert drafted.proposed == k * len(counts) > 25
    assert drafted.accepted > 0.6 * drafted.proposed  # the rest is cut off
    assert served.engine.scheduler.pressure.preemptions > 0
    assert served.engine.mixed_steps > 0
    if mode != "NONE":
        assert rounds.tally.uniform_full == rounds.tally.uniform == rounds.tally.steps > 0
        assert rounds.replays == rounds.tally.steps  # a graph for all drafts of a step
        assert prompts.replays == prompts.tally.steps


@pytest.mark.slow
@pytest.mark.parametrize("num_reqs", [3, 4])
def test_a_round_of_drafts_is_one_graph_and_writes_its_own_blocks(
    num_reqs: int, device: str
) -> None:
    """Three requests are padded to four; padding advances within the null block."""
    k, model = 3, tiny_llama(device)
    rounds = runner(model, "breakable", [1], drafts=k)
    draft = ModelDraft(rounds, rounds)  # no prompts here
    generator = torch.Generator().manual_seed(num_reqs)
    # The last one ends with the width of its table, and drafts behind it.
    lengths = [3, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, WIDTH * BLOCK_SIZE - 1][-num_reqs:]
    for repeat in range(2):
        requests, blocks = [], torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1
        order = iter(blocks.tolist())
        for number, length in enumerate(lengths):
            tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
            request = Request(number, tokens, k + 1)
            request.table.widen(WIDTH)
            needed = min(-(-(length + k) // BLOCK_SIZE), WIDTH)
            request.table.add([next(order) for _ in range(needed)])
            requests.append(request)
        for layer in model.layers:
            layer.attention.k_cache.normal_(generator=torch.Generator(device).manual_seed(repeat))
            layer.attention.v_cache.normal_(generator=torch.Generator(device).manual_seed(repeat))
        caches = [layer.attention.k_cache.clone() for layer in model.layers]
        values = [layer.attention.v_cache.clone() for layer in model.layers]
        replays = rounds.replays
        work = [Work(request, len(request.tokens) - 1, 1 + k, False) for request in requests]
        with torch.inference_mode():
            draft.follow(work, beginnings(requests).to(device))
            drafts = draft.propose(requests, k).tolist()
            assert rounds.replays == replays + 1
            assert draft.propose(requests[:0:-1], k).tolist() == drafts[:0:-1]
            written = [layer.attention.k_cache.clone() for layer in model.layers]
            for layer, keys, old in zip(model.layers, caches, values, strict=True):
                layer.attention.k_cache.copy_(keys)
                layer.attention.v_cache.copy_(old)
            assert drafts == plain_round(rounds, requests, k)
        allowed = {0}
        for request in requests:
            for position in range(len(request.tokens) - 1, len(request.tokens) + k):
                if position < WIDTH * BLOCK_SIZE:
                    block = request.table.blocks[position // BLOCK_SIZE]
                    allowed.add(block * BLOCK_SIZE + position % BLOCK_SIZE)
        for keys, old in zip(written, caches, strict=True):
            changed = (keys != old).flatten(2).any(2).flatten()
            slots = set(changed.nonzero().flatten().tolist())
            assert {slot for slot in slots if slot >= BLOCK_SIZE} == allowed - {0}


def beginnings(requests: list[Request]) -> torch.Tensor:
    """The newest token of each request, its position and its slot."""
    rows = []
    for request in requests:
        position = len(request.tokens) - 1
        slot = request.table.row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        rows.append((request.tokens[-1], position, slot))
    return torch.tensor(rows)


def plain_round(rounds: Any, requests: list[Request], k: int) -> list[list[int]]:
    """The newest token and k drafts, by k steps that the host prepares, without graphs."""
    tokens = [[request.tokens[-1]] for request in requests]
    inside = WIDTH * BLOCK_SIZE
    for step in range(k):
        starts = [len(request.tokens) - 1 + step for request in requests]
        rows = [request.table.row for request in requests]
        ids = torch.tensor([row[-1] for row in tokens])
        known = [min(start, inside - 1) for start in starts]
        batch = paged_batch(ids, known, [1] * len(ids), rows, [False] * len(ids), BLOCK_SIZE)
        inputs = {name: value.to(rounds.device) for name, value in batch.inputs.items()}
        inputs["slot_mapping"][torch.tensor(starts) >= inside] = 0  # in the null block
        metadata = PagedMetadata(
            inputs["block_tables"], inputs["token_to_req"], inputs["positions"]
        )
        with set_forward_context(metadata):
            hidden = rounds.model(inputs["input_ids"], inputs["positions"], inputs["slot_mapping"])
        for row, token in zip(tokens, rounds.model.greedy(hidden).tolist(), strict=True):
            row.append(token)
    return tokens


@pytest.mark.slow
def test_a_round_has_as_many_drafts_as_its_graph() -> None:
    rounds = runner(tiny_llama("cpu"), "NONE", [1], drafts=2)
    request = Request(0, [1, 2], 4)
    request.table.widen(WIDTH)
    request.table.add([1, 2])
    draft = ModelDraft(rounds, rounds)
    draft.follow([Work(request, 1, 3, False)], beginnings([request]))
    assert draft.propose([request], 2).shape == (1, 3)
    with pytest.raises(ValueError, match="a round drafts 2 tokens, not 3"):
        draft.propose([request], 3)


@pytest.mark.slow
def test_a_round_is_for_the_requests_that_a_step_has_sampled() -> None:
    """A chunk in the middle of a prompt has no newest token."""
    model = tiny_llama("cpu")
    prompts, rounds = runner(model, "NONE", [1]), runner(model, "NONE", [1], drafts=1)
    requests = [Request(number, [1 + number] * 6, 4) for number in range(3)]
    for number, request in enumerate(requests):
        request.table.widen(WIDTH)
        request.table.add([1 + 2 * number, 2 + 2 * number])
    work = [
        Work(requests[0], 5, 2, False),
        Work(requests[1], 0, 3, True),
        Work(requests[2], 2, 4, True),
    ]
    draft = ModelDraft(prompts, rounds)
    begin = beginnings(requests)
    begin[1] = -1  # means nothing
    draft.follow(work, begin)
    assert draft.propose([requests[2], requests[0]], 1)[:, 0].tolist() == [3, 1]
    with pytest.raises(KeyError):
        draft.propose([requests[1]], 1)


def test_slots_on_the_device() -> None:
    tables = torch.tensor([[5, 7, 0], [3, 0, 0], [0, 0, 0], [4, 6, 8]], dtype=torch.int32)
    positions = torch.tensor([5, 5, 2, 12])
    # In its second block; not allocated; padding; behind the end of the table.
    assert next_slots(tables, positions, 4).tolist() == [29, 1, 2, 0]


def test_choices_count_the_right_drafts() -> None:
    """Row i of the hidden states is most like token i + 1."""
    model = tiny_llama("cpu")
    model.greedy = lambda hidden: hidden.long().squeeze(-1) + 1  # type: ignore[method-assign]
    hidden = torch.arange(8.0)[:, None]
    buffers = {
        "sampled": torch.tensor([[0, 1, 2], [3, 4, 5], [7, 7, 7]]),
        "input_ids": torch.tensor([9, 1, 2, 9, 4, 9, 7, 6]),
        "positions": torch.tensor([5, 6, 7, 2, 3, 4, 0, 1]),
        "block_tables": torch.tensor([[4, 5, 6], [7, 8, 0], [9, 0, 0]], dtype=torch.int32),
    }
    result = Choices(model)(hidden, buffers)
    # Two drafts of the first request are right, one of the second; the third is a prompt.
    assert result["choices"].tolist() == [[1, 2, 3, 2], [4, 5, 6, 1], [8, 8, 8, 0]]
    size = BLOCK_SIZE
    assert result["begin"].tolist() == [[3, 8, 6 * size], [5, 4, 8 * size], [8, 2, 9 * size + 2]]
    buffers["input_ids"][1] = 5  # what is behind a wrong draft does not count
    assert Choices(model)(hidden, buffers)["choices"][0, -1] == 0
    plain = Choices(model)(hidden, {**buffers, "sampled": buffers["sampled"][:, :1]})
    assert plain["choices"].tolist() == [[1, 0], [4, 0], [8, 0]]
    assert "begin" not in plain


@pytest.mark.slow
def test_drafts_and_draft_tokens_go_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        serve(tiny_llama("cpu"), workload(), draft=NgramDraft(), k=0)
