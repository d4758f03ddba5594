"""What models take and give beside tokens: a cache with slots, three positions a token, several
hidden states; and batches at the edges."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from manager_support import (
    FULL,
    INPUTS,
    NONE,
    PIECEWISE,
    SIZES,
    D,
    Decoder,
    eager,
    manager,
    requests,
)

from cgcompile.errors import BatchError, InputBufferError
from cgcompile.reasons import Reason
from cgcompile.serving.buffers import InputBuffer
from cgcompile.serving.steps import Batch

KINDS = ("plain", "compiled")
SLOTS = 40
MROPE = InputBuffer("positions", (3, "tokens"), torch.int64, 0)
SLOT_MAPPING = InputBuffer("slot_mapping", ("tokens",), torch.int64, 0)


class Caching(Decoder):
    """Writes each token's hidden state to its slot; slot 0 is for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SLOTS, D))

    def forward(self, input_ids, positions, slot_mapping):
        hidden = super().forward(input_ids, positions)
        self.cache.index_copy_(0, slot_mapping, hidden)
        return hidden


class Mrope(Decoder):
    """Three positions a token; returns the last hidden state and the list of the others."""

    def __init__(self) -> None:
        super().__init__(aux=True)

    def forward(self, input_ids, positions):
        return super().forward(input_ids, positions[0] + positions[1] * positions[2] % 3)


def pairs(found: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield found[0], expected[0]
    yield from zip(found[1], expected[1], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_reaches_the_cache(kind: str, device: str) -> None:
    """The slots of a large batch are behind the real rows of a small one in the same buffer."""
    made = manager(kind=kind, device=device, model=Caching(), inputs=(*INPUTS, SLOT_MAPPING))
    made.capture()
    cache = getattr(made.model, "_orig_mod", made.model).cache
    assert made.counters.captures > 0
    before = made.counters.replays
    for lengths, decode in (((16,), False), ((3, 2), False), ((1,) * 8, True), ((1,) * 5, True)):
        batch = requests(*lengths, device=device, decode=decode)
        slots = 1 + torch.randperm(SLOTS - 1, device=device)[: batch.num_tokens]
        batch = replace(batch, inputs={**batch.inputs, "slot_mapping": slots})
        cache.normal_()
        expected = cache.clone()
        found = made.run(batch)
        expected[slots] = found
        assert torch.equal(cache[1:], expected[1:])
    assert made.counters.replays == before + 4


@pytest.mark.parametrize("kind", KINDS)
def test_three_positions_a_token_and_several_hidden_states(kind: str, device: str) -> None:
    made = manager(kind=kind, device=device, model=Mrope(), inputs=(INPUTS[0], MROPE, INPUTS[2]))
    made.capture()
    modes = []
    for lengths, decode in (((5, 2), False), ((1,) * 6, True), ((16,), False), ((1,) * 3, True)):
        batch = requests(*lengths, device=device, decode=decode)
        positions = torch.randint(1, 6, (3, batch.num_tokens), device=device)
        batch = replace(batch, inputs={**batch.inputs, "positions": positions})
        modes.append(made.dispatched(batch).mode)
        expected = eager(getattr(made.model, "_orig_mod", made.model), batch)
        for found, wanted in pairs(made.run(batch), expected):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert modes == [PIECEWISE, FULL, PIECEWISE, FULL]
    views = made.inputs.views(4, 4)["positions"]
    assert views.shape == (3, 4)
    assert views.data_ptr() == made.inputs.buffers["positions"].data_ptr()
    del batch.inputs["positions"]
    with pytest.raises(InputBufferError, match="'positions'"):
        made.run(batch)


def test_the_hidden_states_of_a_size(device: str) -> None:
    made = manager(device=device, model=Mrope(), inputs=(INPUTS[0], MROPE, INPUTS[2]))
    made.capture()
    for size in (8, 2, 4):
        batch = requests(*[1] * size, device=device, decode=True)
        positions = torch.randint(1, 6, (3, size), device=device)
        batch = replace(batch, inputs={**batch.inputs, "positions": positions})
        made.inputs.stage(batch.inputs, (size, size), (size, size))
        for found, wanted in pairs(made.run_fullgraph(size), eager(made.model, batch)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_at_the_edges(kind: str, device: str) -> None:
    made = manager(kind=kind, device=device)
    made.capture()
    for lengths, decode, mode in (
        ((1,), True, FULL),
        ((1,), False, PIECEWISE),
        ((SIZES[-1],), False, PIECEWISE),
        ((SIZES[-1] + 1,), False, NONE),
        ((64,), False, NONE),
    ):
        batch = requests(*lengths, device=device, decode=decode)
        assert made.dispatched(batch).mode is mode
        expected = eager(getattr(made.model, "_orig_mod", made.model), batch)
        torch.testing.assert_close(made.run(batch), expected, rtol=1e-5, atol=1e-5)
    empty = {name: value[:0] for name, value in batch.inputs.items()}
    nothing = Batch(0, 0, {**empty, "query_start_loc": batch.inputs["query_start_loc"][:1]})
    assert made.run(nothing).shape == (0, D)
    assert made.run(Batch(0, 0, {})) is None  # no work, and not counted
    assert made.statistics.reasons() == {Reason.OVERSIZE: 2, Reason.EMPTY_BATCH: 1}
    with pytest.raises(BatchError, match="num_reqs = 0"):
        made.run(replace(batch, num_reqs=0))
    with pytest.raises(InputBufferError, match="room for 64"):
        made.run(requests(65, device=device))
