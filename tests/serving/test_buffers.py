"""Input buffers: fronts that stay, tails that hold what was declared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgcompile.errors import CaptureError
from cgcompile.graphs.capture import capture
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.serving.buffers import InputBuffer, StaticInputs
from cgcompile.serving.errors import InputBufferError

TOKENS, REQS = 8, 4
SPECS = (
    InputBuffer("ids", ("tokens",), torch.int64, 0),
    InputBuffer("slots", ("tokens",), torch.int64, -1),
    InputBuffer("mrope", (3, "tokens"), torch.int64, 7),
    InputBuffer("embeds", ("tokens", 2), torch.float32, float("nan"), optional=True),
    InputBuffer("starts", ("reqs+1",), torch.int32, None),
    InputBuffer("lengths", ("reqs",), torch.int32, 1),
)


def values(tokens: int, reqs: int, device: str) -> dict[str, torch.Tensor]:
    starts = torch.sort(torch.randint(0, tokens + 1, (reqs + 1,)))[0].to(torch.int32)
    rows = {
        "ids": torch.randint(1, 99, (tokens,)),
        "slots": torch.randint(1, 99, (tokens,)),
        "mrope": torch.randint(10, 99, (3, tokens)),
        "embeds": torch.randn(tokens, 2),
        "starts": starts,
        "lengths": torch.randint(2, 99, (reqs,)).to(torch.int32),
    }
    return {name: value.to(device) for name, value in rows.items()}


def steps() -> st.SearchStrategy:
    sizes = st.tuples(st.integers(1, TOKENS), st.integers(1, REQS))
    return st.lists(st.tuples(sizes, sizes, st.booleans()), min_size=1, max_size=6)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(steps())
def test_fronts_and_tails_after_any_steps(taken) -> None:
    check_steps("cpu", taken)


def test_fronts_and_tails_on_a_device(device: str) -> None:
    sizes = [((8, 4), (8, 4), True), ((3, 2), (6, 3), False), ((3, 2), (8, 4), True)]
    check_steps(device, [*sizes, ((1, 1), (2, 2), False), ((2, 1), (8, 4), True)])


def check_steps(device: str, taken) -> None:
    inputs = StaticInputs(SPECS, TOKENS, REQS, device)
    known: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for real, more, from_host in taken:
        padded = (max(real[0], more[0]), max(real[1], more[1]))
        new = values(*real, "cpu" if from_host else device)
        staged = inputs.stage(new, real, padded)
        for spec in SPECS:
            front = staged[spec.name].movedim(spec.dim, 0)
            rows = spec.rows(*real)
            assert front.shape[0] == spec.rows(*padded)
            assert front.data_ptr() == inputs.buffers[spec.name].data_ptr()
            given_rows = new[spec.name].movedim(spec.dim, 0)
            assert torch.equal(front[:rows].cpu(), given_rows.cpu())
            last = given_rows[-1] if spec.tail is None else torch.tensor(spec.tail)
            expected = last.cpu().to(spec.dtype).expand_as(front[rows:])
            assert torch.equal(front[rows:].cpu().nan_to_num(5), expected.nan_to_num(5))
        before = known.setdefault(padded, staged)
        assert all(staged[name] is before[name] for name in staged)


def test_rows_that_are_in_the_buffer_already() -> None:
    inputs = StaticInputs(SPECS[:1], TOKENS, REQS, "cpu")
    inputs.buffers["ids"][:3] = torch.tensor([5, 6, 7])
    staged = inputs.stage({"ids": inputs.buffers["ids"][:3]}, (3, 1), (5, 1))
    assert staged["ids"].tolist() == [5, 6, 7, 0, 0]


def test_what_is_left_out() -> None:
    inputs = StaticInputs(SPECS, TOKENS, REQS, "cpu")
    new = values(3, 2, "cpu")
    assert inputs.stage({**new, "embeds": None}, (3, 2), (4, 2))["embeds"] is None
    del new["embeds"]
    assert inputs.stage(new, (3, 2), (4, 2))["embeds"] is None
    assert inputs.nbytes == 8 * 8 * 2 + 3 * 8 * 8 + 8 * 2 * 4 + 5 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (3, 4)}, "exactly one"),
        ({"shape": ("tokens", "reqs")}, "exactly one"),
        ({"shape": ("rows",)}, "exactly one"),
        ({"tail": 0.5}, "a number that torch.int64 has"),
        ({"tail": float("nan")}, "a number that torch.int64 has"),
    ],
)
def test_declarations_that_cannot_be(settings, message: str) -> None:
    with pytest.raises(InputBufferError, match=message):
        InputBuffer(**{"name": "x", "shape": ("tokens",), "dtype": torch.int64, **settings})


def test_data_that_cannot_be_leaves_all_as_it_was() -> None:
    with pytest.raises(InputBufferError, match="two input buffers are called 'ids'"):
        StaticInputs((SPECS[0], SPECS[0]), TOKENS, REQS, "cpu")
    inputs = StaticInputs(SPECS[:2], TOKENS, REQS, "cpu")
    good = {"ids": torch.arange(1, 4), "slots": torch.arange(1, 4)}
    inputs.stage(good, (3, 1), (4, 1))
    before = {name: each.clone() for name, each in inputs.buffers.items()}
    other = {"ids": torch.arange(5, 8)}
    for bad in ({"slots": torch.arange(4)}, {"slots": torch.ones(3)}, {"slots": None}, {"x": None}):
        with pytest.raises(InputBufferError):
            inputs.stage({**other, **bad}, (3, 1), (4, 1))
    with pytest.raises(InputBufferError, match="room for 8 and 4"):
        inputs.stage(good, (3, 1), (9, 1))
    assert all(torch.equal(before[name], each) for name, each in inputs.buffers.items())


def test_a_capture_would_record_the_copies(device: str) -> None:
    capturer = capture_device(torch.device(device), "host")
    assert capturer is not None
    pool = GraphPool(capturer)
    inputs = StaticInputs(SPECS[:1], TOKENS, REQS, device)
    rows = {"ids": torch.arange(1, 4)}
    with pytest.raises(CaptureError, match="staging inputs: operation not permitted"):
        capture(lambda: inputs.stage(rows, (3, 1), (4, 1)), pool, "a step")
    assert not inputs.buffers["ids"].any()
    assert inputs.stage(rows, (3, 1), (4, 1))["ids"].tolist() == [1, 2, 3, 0]


def test_what_is_no_tensor() -> None:
    inputs = StaticInputs(SPECS[:1], TOKENS, REQS, "cpu")
    with pytest.raises(InputBufferError, match="list"):
        inputs.stage({"ids": [1, 2, 3]}, (3, 1), (4, 1))


def test_idle_rows_are_padding_alone(device: str) -> None:
    """Nothing of the step before is repeated, where nothing is real."""
    specs = (
        InputBuffer("ids", ("tokens",), torch.int64, None),
        InputBuffer("slots", ("tokens",), torch.int64, -1),
        InputBuffer("starts", ("reqs+1",), torch.int32, None),
        InputBuffer("lengths", ("reqs",), torch.int32, 1),
    )
    inputs = StaticInputs(specs, 8, 4, device)
    full = {
        "ids": torch.arange(8) + 5,
        "slots": torch.arange(8),
        "starts": torch.tensor([0, 3, 8], dtype=torch.int32),
        "lengths": torch.tensor([3, 5], dtype=torch.int32),
    }
    inputs.stage(full, (8, 2), (8, 4))
    idle = inputs.idle()
    assert {name: list(value.shape) for name, value in idle.items()} == {
        "ids": [0],
        "slots": [0],
        "starts": [2],
        "lengths": [1],
    }
    views = inputs.stage(idle, (0, 1), (4, 4))
    assert {name: view.tolist() for name, view in views.items()} == {
        "ids": [0] * 4,
        "slots": [-1] * 4,
        "starts": [0] * 5,
        "lengths": [1] * 4,
    }
