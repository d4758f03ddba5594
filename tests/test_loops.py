"""Rounds of a loop equal plain steps, bit for bit, and a step that cannot be repeated is an error."""

import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from lib.hazards import in_another_thread
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CompilationConfig, Reason, set_forward_context
from cgcompile.errors import (
    AddressChangedError,
    ConfigError,
    DispatchError,
    HostValueChangedError,
    LoopRoomError,
    LoopStateError,
)
from cgcompile.torch_compat import raw_memory

WIDTH, WORDS, LENGTH = 8, 11, 48
HOST = CompilationConfig(capture_device="host", compiler="eager")
END = 3  # the token that ends a request


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Decoder(nn.Module):
    """One layer of attention over a cache, which it writes at the position of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, token: torch.Tensor, position: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(token)  # f32[rows, WIDTH]
        rows = torch.arange(cache.shape[0], device=cache.device)
        cache.index_put_((rows, position), x)
        seen = torch.arange(cache.shape[1], device=cache.device) <= position[:, None]
        scores = torch.einsum("rw,rlw->rl", self.query(x), cache).masked_fill(~seen, -1e9)
        return self.out(torch.einsum("rl,rlw->rw", scores.softmax(-1), cache) + x)


@dataclass
class Cache:
    """A cache as an object with tensors and numbers."""

    rows: int
    device: str
    length: int = LENGTH
    keys: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.keys = torch.zeros(self.rows, self.length, WIDTH, device=self.device)


class Box:
    """An object that is no dataclass, as the caches of ``transformers`` are."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def new_state(device: str, rows: int = 2) -> dict[str, Any]:
    return {
        "token": torch.randint(4, WORDS, (rows,), device=device),
        "position": torch.zeros(rows, dtype=torch.long, device=device),
        "cache": Cache(rows, device),
        "done": torch.zeros(rows, dtype=torch.bool, device=device),
    }


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same numbers in other memory."""
    other = new_state(state["cache"].device, len(state["token"]))
    write(other, state)
    return other


def write(state: dict[str, Any], other: dict[str, Any]) -> None:
    """Write the numbers of another state into a state."""
    for name in ("token", "position", "done"):
        state[name].copy_(other[name])
    state["cache"].keys.copy_(other["cache"].keys)


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("token", "position", "done"):
        assert torch.equal(state[name], other[name]), name
    assert torch.equal(state["cache"].keys, other["cache"].keys)


def decoding(
    model: Callable[..., torch.Tensor],
    generator: torch.Generator | None = None,
    sampled: bool = False,
    ends: bool = True,
) -> Callable[[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return a step that decodes one token of each row; rows that are finished stay as they are."""

    def step(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        logits = model(state["token"], state["position"], state["cache"].keys)
        if sampled:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = torch.where(state["done"], 0, token)
        state["position"].add_((~state["done"]).long())
        state["token"].copy_(token)
        if ends:
            state["done"].logical_or_(token == END)
        return {"token": state["token"], "logits": logits}

    return step


def stacked(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def plain(
    step: Callable[[Any], dict[str, torch.Tensor]], state: Any, count: int
) -> dict[str, torch.Tensor]:
    """Run steps without a loop; a step may return memory that the next one writes."""
    results = []
    for _ in range(count):
        results.append({name: value.clone() for name, value in step(state).items()})
    return stacked(results)


def assert_equal_rounds(loop: Any, step: Any, state: Any, other: Any, rounds: int = 4) -> None:
    """Compare rounds with plain steps from an equal state."""
    for _ in range(rounds):
        result, expected = loop(state), plain(step, other, loop.steps)
        for name, value in expected.items():
            assert torch.equal(result[name], value), name
        assert_same(state, other)


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_rounds_equal_plain_steps(device: str, steps: int, unroll: bool) -> None:
    step = decoding(Decoder().to(device), ends=False)
    loop = cgcompile.loop(step, steps, unroll=unroll, config=HOST)
    state = new_state(device)
    assert_equal_rounds(loop, step, state, copied(state))
    fresh = new_state(device)
    write(state, fresh)  # another request in the same memory
    assert_equal_rounds(loop, step, state, fresh)
    counters = loop.counters
    replays = 6 if unroll else 8 * steps - 2
    assert (counters.captures, counters.replays, counters.plain) == (
        1,
        replays,
        {Reason.WARMING: 1},
    )


def test_a_step_with_its_number_is_unrolled(device: str) -> None:
    heads = [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]

    def step(state: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        state["x"].copy_(heads[number](state["x"]).tanh())
        return state["x"] * number

    loop = cgcompile.loop(step, steps=3, config=HOST)
    assert loop.unroll
    state = {"x": torch.randn(2, WIDTH, device=device)}
    for _ in range(4):
        other = {"x": state["x"].clone()}
        expected = torch.stack([step(other, number) for number in range(3)])
        assert torch.equal(loop(state), expected)
        assert torch.equal(state["x"], other["x"])
        state["x"].normal_()
    assert (loop.counters.captures, loop.counters.replays) == (1, 2)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_sampling_draws_what_eager_draws(device: str, own: bool, unroll: bool) -> None:
    generator = torch.Generator(device) if own else None
    step = decoding(Decoder().to(device), generator, sampled=True, ends=False)
    loop = cgcompile.loop(step, 4, unroll=unroll, generator=generator, config=HOST)
    state = new_state(device)
    random: Any = generator or torch
    for seed in range(4):
        other = copied(state)
        random.manual_seed(seed)
        result = loop(state)
        random.manual_seed(seed)
        assert torch.equal(result["token"], plain(step, other, 4)["token"])
    assert loop.counters.replays


def test_a_generator_that_is_not_registered_runs_plain(device: str) -> None:
    step = decoding(Decoder().to(device), torch.Generator(device), sampled=True, ends=False)
    loop = cgcompile.loop(step, 4, config=HOST)
    loop(new_state(device))
    assert loop.counters.plain == {Reason.WARMING: 1, Reason.CAPTURE_FAILED: 3}


def test_another_number_of_rows_is_another_graph(device: str) -> None:
    step = decoding(Decoder().to(device), ends=False)
    loop = cgcompile.loop(step, 4, config=HOST)
    states = {rows: new_state(device, rows) for rows in (1, 3)}
    for _ in range(3):
        for state in states.values():
            assert_equal_rounds(loop, step, state, copied(state), rounds=1)
    assert (loop.counters.captures, loop.counters.replays) == (2, 20)


def test_results_in_other_structures(device: str) -> None:
    def step(state: dict[str, torch.Tensor]) -> Any:
        state["x"].add_(1)
        return Box if state["x"].dim() > 5 else ([state["x"], None, 3], state["x"] * 2)

    loop = cgcompile.loop(step, 2, config=HOST)
    state = {"x": torch.zeros(1, device=device)}
    for start in (0, 2):
        (ones, nothing, number), doubled = loop(state)
        assert (nothing, number) == (None, 3)
        assert ones.tolist() == [[start + 1.0], [start + 2.0]]
        assert torch.equal(doubled, ones * 2)


# ---------------------------------------------------------------- the end


def finished(state: dict[str, Any]) -> torch.Tensor:
    return state["done"]


def counting(
    device: str, ends: list[int]
) -> tuple[Callable[[Any], torch.Tensor], dict[str, torch.Tensor]]:
    """Return a step whose rows finish after these numbers of steps, and its state."""
    state = {
        "n": torch.zeros(len(ends), dtype=torch.long, device=device),
        "end": torch.tensor(ends, device=device),
        "done": torch.zeros(len(ends), dtype=torch.bool, device=device),
        "steps": torch.zeros((), dtype=torch.long, device=device),
    }

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["steps"].add_(1)
        state["n"].add_((~state["done"]).long())
        state["done"].copy_(state["n"] >= state["end"])
        return state["n"]

    return step, state


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("ends", [[1, 1], [3, 9], [8, 8], [17, 2]])
def test_rounds_end_where_all_are_finished(device: str, ends: list[int], unroll: bool) -> None:
    step, state = counting(device, ends)
    loop = cgcompile.loop(step, 4, finished, unroll, config=HOST)
    for _ in range(2):
        state["n"].zero_()
        state["done"].zero_()
        state["steps"].zero_()
        rows = torch.cat(list(loop.rounds(state)))
        needed = max(ends)
        assert rows.shape[0] == -(-needed // 4) * 4  # a round in vain is not yielded
        assert rows[-1].tolist() == state["n"].tolist() == ends
        assert needed <= state["steps"].item() <= needed + 2 * 4 - 1
    assert state["steps"].item() == rows.shape[0] + 4  # the flag is read one round late


def test_without_graphs_the_end_is_read_at_once() -> None:
    step, state = counting("cpu", [5, 2])
    loop = cgcompile.loop(step, 4, finished, config=CompilationConfig(on_fallback="count"))
    assert len(list(loop.rounds(state))) == 2
    assert state["steps"].item() == 8
    assert loop.counters.plain == {Reason.WARMING: 1, Reason.NO_DEVICE: 7}


@pytest.mark.parametrize("unroll", [False, True])
def test_plain_steps_may_return_one_object_with_other_tensors(unroll: bool) -> None:
    returned: dict[str, torch.Tensor] = {}

    def step(state: Any) -> Any:
        state["x"].add_(1)
        returned["twice"] = state["x"] * 2
        return returned

    loop = cgcompile.loop(step, 3, unroll=unroll, config=CompilationConfig(on_fallback="count"))
    for first in (2.0, 8.0):
        out = loop({"x": torch.full((1,), first / 2 - 1)})["twice"]
        assert out.flatten().tolist() == [first, first + 2, first + 4]
    assert loop.counters.plain[Reason.NO_DEVICE] == (1 if unroll else 5)


@pytest.mark.parametrize("value", [None, [False, False], "all"])
def test_an_end_of_another_type_is_an_error(device: str, value: Any) -> None:
    step, state = counting(device, [9])
    loop = cgcompile.loop(step, 2, lambda state: value, config=HOST)
    with pytest.raises(ConfigError, match=r"until\(\) = .*; expected a tensor or a bool"):
        list(loop.rounds(state, limit=4))


@pytest.mark.parametrize("unroll", [False, True])
def test_a_limit_shortens_the_last_round(device: str, unroll: bool) -> None:
    step, state = counting(device, [99])
    loop = cgcompile.loop(step, 4, finished, unroll, config=HOST)
    for _ in range(3):
        state["n"].zero_()
        assert [len(result) for result in loop.rounds(state, limit=10)] == [4, 4, 2]
        assert state["n"].item() == 10
    assert list(loop.rounds(state, limit=0)) == []


def test_room_that_ends_before_the_requests_is_an_error(device: str) -> None:
    step, state = counting(device, [99])
    loop = cgcompile.loop(step, 4, finished, config=HOST)
    lengths: list[int] = []
    rounds = loop.rounds(state, limit=lambda state: 10 - int(state["n"]))
    with pytest.raises(LoopRoomError, match="a round of 4 steps, and room for 0"):
        lengths.extend(len(result) for result in rounds)
    assert lengths == [4, 4, 2]
    step, state = counting(device, [6])
    loop = cgcompile.loop(step, 4, finished, config=HOST)
    assert [len(result) for result in loop.rounds(state, limit=lambda _: 8)] == [4, 4]
    loop = cgcompile.loop(step, 4, config=HOST)  # it never ends: the room is all there is to do
    assert [len(result) for result in loop.rounds(state, limit=lambda _: 6)] == [4, 2]


def test_an_end_that_the_host_knows_is_read_at_once(device: str) -> None:
    step, state = counting(device, [99])
    left = iter([False, False, True])
    loop = cgcompile.loop(step, 4, lambda state: next(left), config=HOST)
    assert len(list(loop.rounds(state))) == 3
    assert state["steps"].item() == 12


def test_a_round_that_would_pass_the_limit_is_not_run() -> None:
    step, state = counting("cpu", [99])
    loop = cgcompile.loop(step, 4, config=HOST)
    with pytest.raises(LoopRoomError, match="a round of 4 steps, and room for 3"):
        loop(state, limit=3)
    assert state["n"].item() == 0
    assert loop(state, steps=3, limit=lambda _: 3).tolist() == [[1], [2], [3]]


# ---------------------------------------------------------------- what a step may change

NUMBER = 0
NUMBERS = types.SimpleNamespace(count=0)
CALLS: list[int] = []
NEXT, RANDOM = itertools.count().__next__, random.Random(0)
BUFFER = torch.zeros(1)


class Kept(nn.Module):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.helper = types.SimpleNamespace(count=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen


def _function() -> None:
    return None


_function.count = 0  # type: ignore[attr-defined]


def _global(state: Any) -> None:
    global NUMBER
    NUMBER += 1


def _closure() -> Callable[[Any], None]:
    count = 0

    def change(state: Any) -> None:
        nonlocal count
        count += 1

    return change


def _iterating(numbers: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        next(numbers)

    return change


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _of_module(change: Callable[[Kept], Any]) -> Callable[[Any], None]:
    module = Kept()

    def step(state: Any) -> None:
        change(module)
        module(state["x"])

    return step


def _put(holder: Any, name: str, value: Any) -> None:
    holder[name] = value


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number behind the state": (
        lambda s: setattr(s["box"], "n", s["box"].n + 1),
        r"state\['box'\].n: \d+ -> \d+",
    ),
    "number in an object in the object": (
        lambda s: setattr(s["box"].inner, "n", s["box"].inner.n + 1),
        r"state\['box'\].inner.n: \d+ -> \d+",
    ),
    "object made anew": (
        lambda s: setattr(s["box"], "inner", Box(n=s["box"].inner.n + 1)),
        r"state\['box'\].inner.n: \d+ -> \d+",
    ),
    "list behind the state": (lambda s: s["box"].items.append(0), r"state\['box'\].items"),
    "text behind the state": (
        lambda s: setattr(s["box"], "text", s["box"].text + "a"),
        r"state\['box'\].text: 'a+' -> 'a+'",
    ),
    "tensor behind the state": (
        lambda s: setattr(s["box"], "t", s["box"].t + 1),
        r"state\['box'\].t",
    ),
    "number in the state": (lambda s: _put(s, "n", s["n"] + 1), r"state\['n'\]: \d+ -> \d+"),
    "tensor of the state": (lambda s: _put(s, "x", s["x"] + 1), r"state\['x'\]"),
    "tensor added to the state": (lambda s: _put(s, "y", s["x"] + 1), r"state\['y'\]"),
    "global": (_global, r"global NUMBER: \d+ -> \d+"),
    "global object": (
        lambda s: setattr(NUMBERS, "count", NUMBERS.count + 1),
        r"global NUMBERS.count: \d+ -> \d+",
    ),
    "global list": (lambda s: CALLS.append(1), "global CALLS"),
    "global tensor": (lambda s: BUFFER.add_(1), "writes global BUFFER"),
    "variable of a closure": (_closure(), r"closure count: \d+ -> \d+"),
    "counter of itertools": (_iterating(itertools.count()), r"closure numbers: .*count\(\d+\)"),
    "iterator of a list": (_iterating(iter([*range(99)])), r"closure numbers: b'\d+' -> b'\d+'"),
    "iterator of two": (_iterating(zip(range(99), range(99), strict=True)), "closure numbers"),
    "bound method of an iterator": (lambda s: NEXT(), "global NEXT"),
    "attribute of a function": (
        lambda s: setattr(_function, "count", _function.count + 1),
        r"global _function.count: \d+ -> \d+",
    ),
    "numbers of one's own": (lambda s: RANDOM.random(), "global RANDOM"),
    "generator": (_iterating(_numbers()), r"closure numbers: .*'number': \d"),
    "iterator behind the state": (lambda s: next(s["box"].numbers), r"state\['box'\].numbers"),
    "random number of Python": (lambda s: random.random(), "Python's random module"),
    "attribute of a module": (
        _of_module(lambda m: setattr(m, "count", m.count + 1)),
        r"module.count",
    ),
    "helper of a module": (
        _of_module(lambda m: setattr(m.helper, "count", m.helper.count + 1)),
        r"module.helper.count",
    ),
    "buffer of a module": (_of_module(lambda m: m.seen.add_(1)), r"writes .*module.seen"),
    "attribute of a class": (
        lambda s: setattr(Kept, "count", Kept.count + 1),
        r"Kept.count: \d+ -> \d+",
    ),
}


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_beside_the_tensors_of_the_state_is_an_error(
    device: str, name: str, unroll: bool
) -> None:
    change, path = CHANGES[name]

    def step(state: Any) -> torch.Tensor:
        change(state)
        return state["x"].add_(1)

    loop = cgcompile.loop(step, 3, unroll=unroll, config=HOST)
    box = Box(n=0, inner=Box(n=0), items=[], text="", t=torch.zeros(1, device=device))
    box.numbers = itertools.count()
    state = {"x": torch.zeros(2, device=device), "n": 0, "box": box}
    for _ in range(2):  # no graph is kept, and the change is not taken for granted
        with pytest.raises(LoopStateError, match=path) as caught:
            [loop(state) for _ in range(3)]  # the first round may run plain
        assert caught.value.path.removesuffix(".") in str(caught.value)
    assert not loop.wrapper.entries


def test_a_refused_capture_leaves_no_trace(device: str) -> None:
    count = 0

    def step(state: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        state["box"].n += 1
        state["box"].items.append(count)
        return state["x"].add_(1)

    box = Box(n=0, items=[])
    state = {"x": torch.zeros(1, device=device), "box": box}
    with pytest.raises(LoopStateError):
        cgcompile.loop(step, 2, config=HOST)(state)
    assert (count, box.n, box.items, state["x"].item()) == (1, 1, [1], 1)  # of the plain step


def test_what_the_first_step_creates_is_not_a_change(device: str) -> None:
    class Lazy:
        keys: torch.Tensor | None = None
        ready = False

        def update(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready or self.keys is None:
                self.keys, self.ready = torch.zeros_like(x), True
            return self.keys.add_(x)

    def step(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"y": state["lazy"].update(state["x"]) * 2}

    loop = cgcompile.loop(step, 4, config=HOST)
    state, other = ({"x": torch.ones(2, device=device), "lazy": Lazy()} for _ in range(2))
    for _ in range(3):
        assert torch.equal(loop(state)["y"], plain(step, other, 4)["y"])
    assert (loop.counters.replays, loop.counters.plain) == (9, {Reason.WARMING: 2})


# ---------------------------------------------------------------- what is compared


def test_another_address_of_the_state_is_an_error(device: str) -> None:
    step = decoding(Decoder().to(device))
    loop = cgcompile.loop(step, 2, config=HOST)
    state = new_state(device)
    loop(state)
    with pytest.raises(AddressChangedError, match=r"state\['token'\] is at .*\n.*reset a cache"):
        loop({**state, "token": state["token"].clone()})
    with pytest.raises(AddressChangedError, match=r"state\['cache'\].keys"):
        loop({**state, "cache": Cache(2, device)})
    assert_equal_rounds(loop, step, state, copied(state), rounds=2)  # the state as it was is right


def test_another_object_and_another_number_are_errors(device: str) -> None:
    def step(state: dict[str, Any]) -> torch.Tensor:
        return state["x"].mul_(state["box"].scale)

    loop = cgcompile.loop(step, 2, config=HOST)
    box = Box(scale=2.0, keys=torch.zeros(3, device=device))
    state = {"x": torch.ones(1, device=device), "box": box}
    loop(state)
    with pytest.raises(HostValueChangedError, match=r"state\['box'\] is another Box"):
        loop({**state, "box": Box(scale=2.0, keys=torch.zeros(3, device=device))})
    box.scale = 3.0
    with pytest.raises(HostValueChangedError, match=r"state\['box'\].scale is 3.0, was 2.0"):
        loop(state)
    other = {
        "x": torch.ones(1, device=device),
        "box": Box(scale=3.0, keys=torch.zeros(5, device=device)),
    }  # other shapes
    assert loop(other).flatten().tolist() == [3.0, 9.0]


def test_weights_are_compared(device: str) -> None:
    model = Decoder().to(device)
    loop = cgcompile.loop(decoding(model), 2, config=HOST)
    state = new_state(device)
    loop(state)
    model.out.weight = nn.Parameter(model.out.weight.clone())
    with pytest.raises(AddressChangedError, match="weight"):
        loop(state)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_each_mode_has_its_graph(device: str, first: Any) -> None:
    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"].add_(1 if torch.is_inference_mode_enabled() else 2)

    loop = cgcompile.loop(step, 3, config=HOST)
    state = {"x": torch.zeros(1, device=device)}
    for mode in (first, torch.no_grad, torch.inference_mode, torch.no_grad):
        state["x"].zero_()
        with mode():
            last = loop(state)[-1].item()
        assert last == (3 if mode is torch.inference_mode else 6)
    assert loop.counters.captures == 2


def test_several_states_of_one_layout_where_the_setting_allows_it(device: str) -> None:
    step = decoding(Decoder().to(device), ends=False)
    config = CompilationConfig(capture_device="host", on_input_change="recapture")
    loop = cgcompile.loop(step, 4, config=config)
    states = [new_state(device) for _ in range(2)]
    for _ in range(3):
        for state in states:
            assert_equal_rounds(loop, step, state, copied(state), rounds=1)
    assert loop.counters.captures == 2


@pytest.mark.parametrize("debug", ["poison", "stale"])
@pytest.mark.parametrize("unroll", [False, True])
def test_results_are_the_callers(device: str, debug: str, unroll: bool) -> None:
    if debug == "stale" and not raw_memory.can_expire_storages():
        pytest.skip("this build of torch cannot make a storage raise")
    step = decoding(Decoder().to(device), ends=False)
    config = CompilationConfig(capture_device="host", debug=debug)
    loop = cgcompile.loop(step, 4, unroll=unroll, config=config)
    state = new_state(device)
    other = copied(state)
    results = [loop(state) for _ in range(4)]
    for result in results:
        expected = plain(step, other, 4)
        assert torch.equal(result["token"], expected["token"])
        assert torch.equal(result["logits"], expected["logits"])


def test_gradients_run_plain_and_stay(device: str) -> None:
    weight = nn.Parameter(torch.ones(2, device=device))

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"] * weight

    loop = cgcompile.loop(step, 2, config=HOST)
    with torch.enable_grad():
        for _ in range(3):
            loop({"x": torch.full((2,), 3.0, device=device)}).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [18.0, 18.0]
    assert set(loop.counters.plain) <= {Reason.GRADIENTS, Reason.WARMING}


# ---------------------------------------------------------------- where it runs plain


def test_a_step_that_reads_the_device_runs_plain(device: str) -> None:
    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"].add_(state["x"].sum().item())

    config = CompilationConfig(capture_device="host", on_fallback="count")
    loop = cgcompile.loop(step, 2, config=config)
    state = {"x": torch.ones(1, device=device)}
    assert torch.cat([loop(state), loop(state)]).flatten().tolist() == [2.0, 4.0, 8.0, 16.0]
    assert loop.counters.plain == {Reason.WARMING: 1, Reason.CAPTURE_FAILED: 3}
    strict = CompilationConfig(capture_device="host", on_fallback="raise")
    with pytest.raises(DispatchError, match="capture_failed"):
        cgcompile.loop(step, 2, config=strict)({"x": torch.ones(1, device=device)})


def test_errors_of_a_step_are_its_own(device: str) -> None:
    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        if state["fails"].fails:
            raise KeyError("of the step")
        return state["x"].add_(1)

    loop = cgcompile.loop(step, 2, config=HOST)
    fails = Box(fails=True)
    state = {"x": torch.zeros(1, device=device), "fails": fails}
    with pytest.raises(KeyError, match="of the step"):
        loop(state)
    fails.fails = False
    assert loop(state).flatten().tolist() == [1.0, 2.0]
    assert loop.counters.failures == 1


def test_a_loop_in_a_capture_becomes_a_part_of_it(device: str) -> None:
    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"].mul_(2)

    inner = cgcompile.loop(step, 3, config=HOST)
    state = {"x": torch.ones(1, device=device)}
    outer = cgcompile.CUDAGraphWrapper(lambda: inner(state), HOST)
    context = {"cudagraph_runtime_mode": "FULL", "batch_descriptor": BatchDescriptor(1)}
    for start in (1, 8, 64):
        with set_forward_context(**context):
            assert outer().flatten().tolist() == [start * 2, start * 4, start * 8]
    assert (outer.counters.captures, outer.counters.replays) == (1, 2)
    assert inner.counters.plain == {Reason.INSIDE_CAPTURE: 3}


def test_a_region_runs_plain(device: str) -> None:
    loop = cgcompile.loop(lambda state: state["x"].add_(1), 2, config=HOST)
    with cgcompile.eager_region():
        assert loop({"x": torch.zeros(1, device=device)}).flatten().tolist() == [1.0, 2.0]
    assert loop.counters.plain == {Reason.EAGER_REGION: 2}


def test_descriptors_of_a_forward_context_are_keys(device: str) -> None:
    """As of a wrapper: LoRA is another graph, and mode NONE is none."""

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = cgcompile.get_forward_context().attn_metadata
        return state["x"].add_(scale["scale"])

    loop = cgcompile.loop(step, 3, config=HOST)
    state, scale = {"x": torch.zeros(1, device=device)}, torch.ones(1, device=device)
    for lora in (False, True, False, True):
        descriptor = BatchDescriptor(1, has_lora=lora)
        with set_forward_context(
            {"scale": scale}, cudagraph_runtime_mode="FULL", batch_descriptor=descriptor
        ):
            state["x"].zero_()
            assert loop(state).flatten().tolist() == [scale.item() * n for n in (1, 2, 3)]
        scale.add_(1)
    assert loop.counters.captures == 2
    with set_forward_context({"scale": scale}):
        loop(state)
    assert loop.counters.plain[Reason.MODE_NONE] == 3


# ---------------------------------------------------------------- steps of all kinds


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("kind", ["torch.compile", "cgcompile.compile", "wrapper", "step"])
def test_compiled_steps(device: str, kind: str, unroll: bool) -> None:
    model = Decoder().to(device)
    eager = decoding(model, ends=False)
    if kind == "torch.compile":
        step = decoding(torch.compile(model, backend=cgcompile.Backend(HOST)), ends=False)
    elif kind == "cgcompile.compile":
        step = decoding(cgcompile.compile(model, HOST), ends=False)
    elif kind == "wrapper":
        step = decoding(cgcompile.CUDAGraphWrapper(model, HOST), ends=False)
    else:
        step = torch.compile(eager, backend=cgcompile.Backend(HOST))
    loop = cgcompile.loop(step, 4, unroll=unroll, config=HOST)
    state = new_state(device)
    assert_equal_rounds(loop, eager, state, copied(state))
    assert loop.counters.captures == 1
    assert loop.counters.replays == (2 if unroll else 14)


@pytest.mark.slow
def test_compiled_code_may_call_a_loop(device: str) -> None:
    """It is a part of the trace: no graph of its own."""
    step = decoding(Decoder().to(device), ends=False)
    loop = cgcompile.loop(step, 3, config=HOST)
    compiled = torch.compile(lambda state: loop(state)["token"] + 1, backend="eager")
    state = new_state(device)
    for _ in range(2):
        other = copied(state)
        assert torch.equal(compiled(state), plain(step, other, 3)["token"] + 1)
    assert loop.counters.captures == 0


def test_a_loop_in_the_step_of_a_loop(device: str) -> None:
    inner = cgcompile.loop(lambda state: state["x"].mul_(2), 2, config=HOST)

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return inner(state).sum(0).add_(1)

    outer = cgcompile.loop(step, 3, config=HOST)
    state, value = {"x": torch.ones(1, device=device)}, 1
    for _ in range(3):
        sums = outer(state).flatten().tolist()
        assert sums == [value * 4**n * 6 + 1 for n in range(3)]
        value *= 64
    assert (outer.counters.captures, outer.counters.replays) == (1, 7)
    assert inner.counters.captures == 0


def test_a_loop_is_a_step(device: str) -> None:
    inner = cgcompile.loop(lambda state, number: state["x"].add_(number), 3, config=HOST)
    outer = cgcompile.loop(inner, 2, config=HOST)
    assert not outer.unroll
    state = {"x": torch.zeros(1, device=device)}
    for start in (0, 6, 12):
        added = [[0, 1, 3], [3, 4, 6]]
        expected = [[start + number for number in row] for row in added]
        assert outer(state).flatten(1).tolist() == expected


def test_a_module_is_a_step(device: str) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), 2.0, device=device))

        def forward(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
            return state["x"].mul_(self.scale)

    loop = cgcompile.loop(Step(), 2, config=HOST)
    state = {"x": torch.ones(1, device=device)}
    assert torch.cat([loop(state), loop(state)]).flatten().tolist() == [2.0, 4.0, 8.0, 16.0]
    assert repr(loop) == "Loop(Step, 2 steps, replays of one, 1 captured)"


def test_release_captures_again(device: str) -> None:
    loop = cgcompile.loop(lambda state: state["x"].add_(1), 4, config=HOST)
    state = {"x": torch.zeros(1, device=device)}
    loop(state)
    loop.release()
    assert not loop.wrapper.entries
    assert loop({"x": torch.ones(1, device=device)}).flatten().tolist() == [2.0, 3.0, 4.0, 5.0]
    assert loop.counters.captures == 2


def test_a_dropped_loop_frees_its_graphs_and_the_state_at_once(device: str) -> None:
    state = new_state(device)
    loop = cgcompile.loop(decoding(Decoder().to(device)), 4, config=HOST)
    for result in loop.rounds(state, limit=8):
        assert len(result["token"]) == 4
    pool, cache = weakref.ref(loop.wrapper.pool), weakref.ref(state["cache"])
    gc.collect()
    gc.disable()
    try:
        del loop
        assert pool() is None
        del state
        assert cache() is None
    finally:
        gc.enable()


def test_shapes_of_results_that_differ_are_an_error(device: str) -> None:
    def step(state: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return state["x"][: 2 - number].clone()

    loop = cgcompile.loop(step, 2, config=HOST)
    with pytest.raises(LoopStateError, match=r"step 1 of a round returned tensors \[\(\(1,\)"):
        loop({"x": torch.zeros(2, device=device)})
    other_dtype = lambda state, number: state["x"] if number else state["x"].long()  # noqa: E731
    with pytest.raises(LoopStateError, match="float32"):
        cgcompile.loop(other_dtype, 2, config=HOST)({"x": torch.zeros(2, device=device)})
    other_names = lambda state, number: {f"y{number}": state["x"]}  # noqa: E731
    with pytest.raises(LoopStateError, match="structure"):
        cgcompile.loop(other_names, 2, config=HOST)({"x": torch.zeros(2, device=device)})


def test_bad_arguments() -> None:
    def numbered(state: Any, number: int) -> None:
        return None

    with pytest.raises(ConfigError, match="the step takes its number"):
        cgcompile.loop(numbered, unroll=False)
    with pytest.raises(ConfigError, match="steps = 0"):
        cgcompile.loop(numbered, 0)
    with pytest.raises(ConfigError, match="step = 3"):
        cgcompile.loop(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="until = 3"):
        cgcompile.loop(numbered, until=3)  # type: ignore[arg-type]
    loop = cgcompile.loop(numbered, 2)
    with pytest.raises(ConfigError, match="steps = 0"):
        loop({}, steps=0)
    with pytest.raises(ConfigError, match="limit = 'all'"):
        loop({}, limit="all")  # type: ignore[arg-type]


async def _awaited(state: Any) -> Any:
    return state["x"].add_(1)


def _yielding(state: Any) -> Iterator[Any]:
    yield state["x"].add_(1)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (_awaited, "coroutine"),
        (_yielding, "generator"),
        (torch.no_grad()(_yielding), "generator"),
        (lambda state: {"rows": [_yielding(state)]}, "generator"),
    ],
)
def test_a_step_that_runs_nothing_is_an_error(
    device: str, step: Any, kind: str, unroll: bool, warmups: int
) -> None:
    config = CompilationConfig(capture_device="host", num_warmups=warmups)
    loop = cgcompile.loop(step, 2, unroll=unroll, config=config)
    with pytest.raises(ConfigError, match=rf"step returns a {kind} .*\n.*without yield and await"):
        loop({"x": torch.zeros(1, device=device)})
    assert not loop.wrapper.entries


def test_rounds_in_a_second_thread(device: str) -> None:
    loop = cgcompile.loop(lambda state: state["x"].add_(1), 2, config=HOST)
    state = {"x": torch.zeros(1, device=device)}
    loop(state)
    with pytest.raises(DispatchError, match=r"a round in thread .*(?s:.)*wrapper\.allow_threads"):
        in_another_thread(loop, state)
    loop.wrapper.allow_threads()
    assert in_another_thread(loop, state).flatten().tolist() == [3.0, 4.0]


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("unroll", [False, True])
def test_verify_compares_rounds_with_plain_steps(device: str, unroll: bool) -> None:
    generator = torch.Generator(device)
    step = decoding(Decoder().to(device), generator, sampled=True)
    loop = cgcompile.loop(step, 4, unroll=unroll, generator=generator, config=HOST)
    state = new_state(device)
    before, drawn = copied(state), generator.get_state()
    verification = cgcompile.verify(loop, state)
    assert verification.ok, str(verification)
    assert verification.replays == (3 if unroll else 12)
    assert_same(state, before)  # all is restored
    assert torch.equal(generator.get_state(), drawn)


def test_verify_finds_what_a_capture_cannot_see(device: str) -> None:
    """A number that is read and written by a name that no code has."""
    box, name = Box(n=0), "".join(("n",))

    def step(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        setattr(box, name, getattr(box, name) + 1)
        return {"x": state["x"].add_(getattr(box, name))}

    verification = cgcompile.verify(
        cgcompile.loop(step, 4, config=HOST), {"x": torch.zeros(2, device=device)}
    )
    assert not verification.ok
    assert verification.differences[0].value == "['x']"


def test_tools_take_a_loop(device: str) -> None:
    loop = cgcompile.loop(decoding(Decoder().to(device)), 4, config=HOST)
    state = new_state(device)
    loop(state)
    graph, warming = cgcompile.coverage(loop).rows
    assert (graph.mode, graph.hits, warming.reason) == ("FULL", 3, "warming")
    assert [record.why for record in cgcompile.debug.timeline(loop)] == [None]
    assert cgcompile.debug.doctor(loop).ok
    assert cgcompile.debug.doctor(loop, state).ok
    assert loop.unwrap() is loop.runnable


# ---------------------------------------------------------------- whatever comes

ROUNDS = st.lists(
    st.tuples(
        st.sampled_from([1, 3]),  # rows
        st.sampled_from(["rounds", "call", "shorter", "reset", "moved", "plain"]),
        st.integers(1, 9),  # a limit
        st.booleans(),  # inference mode
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
@hypothesis.settings(max_examples=15)
@hypothesis.given(schedule=ROUNDS, steps=st.sampled_from([1, 2, 4]), sampled=st.booleans())
def test_any_schedule_of_rounds_equals_plain_steps(
    unroll: bool, schedule: Any, steps: int, sampled: bool
) -> None:
    torch.manual_seed(0)
    step = decoding(Decoder(), sampled=sampled, ends=False)
    loop = cgcompile.loop(step, steps, unroll=unroll, config=HOST)
    states = {rows: new_state("cpu", rows) for rows in (1, 3)}
    others = {rows: copied(state) for rows, state in states.items()}
    for rows, action, limit, inference in schedule:
        state, other, seed = states[rows], others[rows], limit
        with torch.inference_mode(inference), torch.no_grad():
            torch.manual_seed(seed)
            if action == "reset":
                for held in (state, other):
                    held["position"].zero_()
                    held["cache"].keys.zero_()
                continue
            if action == "moved":
                # By mode, descriptor, modes of torch, and number of unrolled steps.
                keys = [key[1:4] for key in loop.wrapper.captured_steps.captured]
                count = (steps,) if unroll else ()
                if (BatchDescriptor(rows), (False, inference), count) in keys:
                    with pytest.raises(AddressChangedError):
                        loop(copied(state), steps=steps)
                continue
            if action == "plain":
                with cgcompile.eager_region():
                    results = [loop(state)]
            elif action == "rounds":
                results = list(loop.rounds(state, limit=limit))
            else:
                count = steps if action == "call" else min(limit, steps)
                results = [loop(state, count)]
            torch.manual_seed(seed)
            for result in results:
                expected = plain(step, other, len(result["token"]))
                assert torch.equal(result["token"], expected["token"])
            assert_same(state, other)
    assert not loop.counters.failures or "moved" in [row[1] for row in schedule]
