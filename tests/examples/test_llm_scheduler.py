"""Blocks, chunks of prompts, admission and preemption; plain Python."""

import random

import pytest
from llm_engine.scheduler import BlockAllocator, Request, Scheduler, Work
from llm_engine.workload import Workload, scarce_blocks


def scheduler(blocks: int = 20, **more: int) -> Scheduler:
    settings = {"block_size": 4, "width": 16, "max_num_reqs": 4, "max_num_tokens": 16, **more}
    return Scheduler(BlockAllocator(blocks), **settings)


def request(number: int, prompt: int, tokens: int = 8, arrival: int = 0) -> Request:
    return Request(number, list(range(1, prompt + 1)), tokens, arrival)


def advance(scheduler: Scheduler, work: list[Work]) -> None:
    """Do what the engine does after a step in which no draft was right."""
    for item in work:
        request = item.request
        if item.prefill:
            request.computed += item.count
        if item.samples:
            request.prefilling = False
            taken = request.accept([7])
            request.computed += 0 if item.prefill else taken
        if request.done:
            scheduler.finish(request)


def shown(work: list[Work]) -> list[tuple[int, int, int, bool]]:
    return [(item.request.number, item.start, item.count, item.prefill) for item in work]


def test_blocks_are_handed_out_once() -> None:
    allocator = BlockAllocator(5)
    first, second = allocator.take(3), allocator.take(1)
    assert first == [1, 2, 3]
    assert second == [4]
    assert allocator.take(1) is None
    allocator.give_back(first)
    assert allocator.take(4) is None
    assert allocator.num_free == 3
    assert allocator.take(2) == [1, 2]


def test_prompts_run_in_chunks_beside_decoding() -> None:
    planner = scheduler()
    planner.add(request(0, 3))
    planner.add(request(1, 20))
    planner.add(request(2, 6))
    steps = []
    for _ in range(4):
        work = planner.schedule()
        steps.append(shown(work))
        for item in work:
            assert item.samples is (
                not item.prefill or item.start + item.count == len(item.request.tokens)
            )
        advance(planner, work)
    assert steps == [
        [(0, 0, 3, True), (1, 0, 13, True)],
        [(0, 3, 1, False), (1, 13, 7, True), (2, 0, 6, True)],
        [(0, 4, 1, False), (1, 20, 1, False), (2, 6, 1, False)],
        [(0, 5, 1, False), (1, 21, 1, False), (2, 7, 1, False)],
    ]


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    planner = scheduler(max_num_tokens=4)
    planner.add(request(0, 5))
    advance(planner, planner.schedule())
    assert shown(planner.schedule()) == [(0, 4, 1, True)]


def test_the_youngest_is_preempted_and_starts_anew() -> None:
    planner = scheduler(blocks=6)  # five blocks of four tokens
    planner.add(request(0, 7))
    planner.add(request(1, 7))
    seen = []
    while planner.busy:
        work = planner.schedule()
        seen.append(shown(work))
        advance(planner, work)
    assert seen == [
        [(0, 0, 7, True), (1, 0, 7, True)],
        [(0, 7, 1, False), (1, 7, 1, False)],  # both have filled two blocks then
        *([(0, start, 1, False)] for start in range(8, 14)),  # with the fifth, and two of the other
        [(1, 0, 9, True)],  # its own output is part of its prompt now
        *([(1, start, 1, False)] for start in range(9, 14)),
    ]
    assert planner.pressure.preemptions == 1
    assert planner.pressure.full_steps == 6
    assert planner.allocator.num_free == 5


def test_drafts_have_slots() -> None:
    planner = scheduler(draft_tokens=3)
    planner.add(request(0, 4))
    advance(planner, planner.schedule())
    (work,) = planner.schedule()
    assert (work.start, work.count) == (4, 4)
    assert len(work.request.table) == 3  # for the next drafts as well, behind four new tokens
    with pytest.raises(ValueError, match="up to 16 tokens; the budget: 15"):
        scheduler(draft_tokens=3, max_num_tokens=15)


def test_a_request_that_can_never_run_is_refused() -> None:
    planner = scheduler(blocks=4)
    planner.add(request(0, 4, tokens=8))
    with pytest.raises(ValueError, match="request 1 needs 4 blocks; it can have 3"):
        planner.add(request(1, 5, tokens=8))
    with pytest.raises(ValueError, match="needs a prompt"):
        Request(0, [], 3)


def test_a_request_ends_at_its_limit_or_at_a_stop_token() -> None:
    one = Request(0, [5, 6], 3, stop_tokens=frozenset({6}))
    assert not one.done  # the prompt may hold a stop token
    assert one.accept([1, 6, 2]) == 2
    assert one.done
    other = Request(0, [5], 3)
    assert other.accept([1, 2, 3, 4]) == 3
    assert other.output == [1, 2, 3]


@pytest.mark.parametrize("draft_tokens", [0, 2])
@pytest.mark.parametrize("seed", range(20))
def test_any_workload_ends_and_blocks_are_never_shared(seed: int, draft_tokens: int) -> None:
    source = random.Random(seed)
    workload = Workload(12, source.randint(4, 30), source.randint(2, 20), 50, seed=seed)
    requests, size = workload.make(), source.randint(1, 5)
    blocks = scarce_blocks(requests, 4, size, draft_tokens)
    planner = scheduler(
        blocks, block_size=size, width=blocks, max_num_tokens=16, draft_tokens=draft_tokens
    )
    for item in requests:
        planner.add(item)
    for _ in range(2000):
        if not planner.busy:
            break
        work = planner.schedule()
        assert work
        assert sum(item.count for item in work) <= 16
        prefill = [item.prefill for item in work]
        assert prefill == sorted(prefill)  # decoding first
        used = [block for item in planner.running for block in item.table.blocks]
        assert len(used) == len(set(used))
        assert 0 not in used
        assert len(used) + planner.allocator.num_free == blocks - 1
        for item in work:
            table = item.request.table
            assert len(table) * size >= item.start + item.count
            assert table.row.tolist() == table.blocks + [0] * (blocks - len(table))
        advance(planner, work)
    assert all(item.done for item in requests)
    assert planner.allocator.num_free == blocks - 1
