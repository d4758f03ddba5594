"""What only a GPU shows of loops: no wait of the host, the late flag, streams, a failed capture."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.errors import LoopStateError
from cgcompile.reasons import Reason

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_gradients")]
EAGER = CompilationConfig(compiler="eager")
SLEEP = 20_000_000  # cycles: about ten milliseconds


def counting(end: int, slow: bool = False) -> tuple[Callable[[Any], Any], dict[str, torch.Tensor]]:
    """Return a step that counts until ``end``, and its state; ``steps`` counts all steps."""

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        if slow:
            torch.cuda._sleep(SLEEP)
        state["steps"].add_(1)
        state["n"].add_((~state["done"]).long())
        state["done"].copy_(state["n"] >= end)
        return state["n"]

    zeros = {"dtype": torch.long, "device": "cuda"}
    state = {"n": torch.zeros(2, **zeros), "steps": torch.zeros((), **zeros)}  # type: ignore[arg-type]
    return step, {**state, "done": torch.zeros(2, dtype=torch.bool, device="cuda")}


def reset(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        tensor.zero_()


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_the_flag_is_read_one_round_late(steps: int, unroll: bool) -> None:
    step, state = counting(20)
    loop = cgcompile.loop(step, steps, lambda state: state["done"], unroll)
    for _ in range(3):
        reset(state)
        results = [result.clone() for result in loop.rounds(state)]
        assert torch.cat(results)[-1].tolist() == [20, 20]
        rounds = -(-20 // steps)
        assert len(results) == rounds
        assert state["steps"].item() == (rounds + 1) * steps  # one in vain
    assert loop.counters.replays


def test_rounds_do_not_wait_for_the_device() -> None:
    """A read of the host would be an error; the flag of the round before is one that has run."""
    step, state = counting(12)
    loop = cgcompile.loop(step, 4, lambda state: state["done"])
    loop(state)
    reset(state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        count = sum(1 for _ in loop.rounds(state))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count == 3


def test_a_round_is_launched_while_the_one_before_runs() -> None:
    step, state = counting(100, slow=True)
    loop = cgcompile.loop(step, 4, lambda state: state["done"])
    loop(state)
    torch.cuda.synchronize()
    rounds = loop.rounds(state, limit=12)
    next(rounds)
    next(rounds)  # it has waited for the flag of the first round, and not for this one
    assert not torch.cuda.current_stream().record_event().query()
    list(rounds)
    assert state["n"].tolist() == [16, 16]


def test_rounds_on_another_stream_keep_their_order() -> None:
    step, state = counting(1000, slow=True)
    loop = cgcompile.loop(step, 2)
    side = torch.cuda.Stream()
    results = [loop(state)]
    for stream in (side, torch.cuda.current_stream(), side):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(loop(state))
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.cat(results)[:, 0].tolist() == [*range(1, 9)]


@pytest.mark.parametrize("own", [False, True])
def test_a_failed_capture_leaves_the_generators_usable(own: bool) -> None:
    generator = torch.Generator("cuda") if own else None
    random: Any = generator or torch

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["x"].uniform_(generator=generator)
        if state["x"].sum().item() < -1:  # the host reads
            raise AssertionError
        return state["x"]

    loop = cgcompile.loop(step, 3, generator=generator)
    state = {"x": torch.zeros(4, device="cuda")}
    for seed in range(2):
        random.manual_seed(seed)
        result = loop(state)
        random.manual_seed(seed)
        expected = [torch.zeros(4, device="cuda").uniform_(generator=generator) for _ in range(3)]
        assert torch.equal(result, torch.stack(expected))
    assert loop.counters.plain[Reason.CAPTURE_FAILED] == 5

    drawn = cgcompile.loop(lambda s: s["x"].uniform_(generator=generator), 3, generator=generator)
    for seed in range(3):
        random.manual_seed(seed)
        result = drawn(state)
        random.manual_seed(seed)
        expected = [torch.zeros(4, device="cuda").uniform_(generator=generator) for _ in range(3)]
        assert torch.equal(result, torch.stack(expected))
    assert drawn.counters.replays == 7


def test_a_write_to_a_tensor_of_the_host_is_an_error() -> None:
    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["count"].add_(1)
        return state["x"].add_(1)

    loop = cgcompile.loop(step, 3)
    state = {"x": torch.zeros(1, device="cuda"), "count": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(
        LoopStateError, match=r"writes state\['count'\], a tensor that is on the cpu"
    ):
        loop(state)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["torch.compile", "cgcompile.compile"])
@pytest.mark.parametrize("unroll", [False, True])
def test_a_compiled_step_is_compiled_once(entry: str, unroll: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    if entry == "torch.compile":
        handle = cgcompile.Backend()
        compiled: Any = torch.compile(model, backend=handle)
    else:
        compiled = cgcompile.compile(model)
        handle = compiled.backend

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"].add_(compiled(state["x"])).tanh_()

    loop = cgcompile.loop(step, 8, unroll=unroll)
    state = {"x": torch.randn(2, 64, device="cuda")}
    for _ in range(4):
        x = state["x"].clone()
        result = loop(state)
        for row in result:
            x = (x + model(x)).tanh()
            torch.testing.assert_close(row, x, rtol=1e-3, atol=1e-3)
            x = row.clone()
        state["x"].normal_()
    assert loop.counters.captures == 1
    assert len(handle.graphs) == 1


def test_memory_is_flat_over_rounds() -> None:
    step, state = counting(5)
    loop = cgcompile.loop(step, 4, lambda state: state["done"])
    for _ in range(3):
        reset(state)
        list(loop.rounds(state))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        reset(state)
        list(loop.rounds(state))
    assert torch.cuda.memory_allocated() == before
