"""Whole numbers of any type: schedulers and processors count in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lib.front_ends import ROWS, WIDTH, front_end, layers

from cgcompile import BatchDescriptor, CompilationConfig, set_forward_context
from cgcompile.encoder import EncoderCudaGraphPathConfig, EncoderItemSpec
from cgcompile.errors import CGCompileError
from cgcompile.serving import Batch, InputBuffer
from cgcompile.settings import whole


class Indexable:
    """A whole number by ``__index__`` alone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


KINDS = [np.int64, np.int32, np.uint8, Indexable]
REFUSED = [True, 3.0, "3", None, np.float32(3), np.bool_(True), torch.tensor(3), [3]]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_gives_an_int(kind: Callable[[int], Any]) -> None:
    assert type(whole(kind(3))) is int
    assert whole(kind(3)) == 3


@pytest.mark.parametrize("value", REFUSED)
def test_values_that_are_no_whole_number(value: object) -> None:
    assert whole(value) is None
    for make in (
        lambda: BatchDescriptor(value),
        lambda: EncoderItemSpec(value, 1),
        lambda: EncoderCudaGraphPathConfig(axes={"frames": (value,)}),
    ):
        with pytest.raises(CGCompileError):
            make()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_other_types_become_ints(kind: Callable[[int], Any]) -> None:
    descriptor = BatchDescriptor(kind(8), kind(4), True, True, kind(2), kind(2))
    assert descriptor == BatchDescriptor(8, 4, True, True, 2, 2)
    assert all(type(field) in (int, bool, tuple) for field in descriptor)
    assert hash(descriptor) == hash(BatchDescriptor(8, 4, True, True, 2, 2))
    item = EncoderItemSpec(kind(4), kind(1), path_output_tokens={"a": kind(1)}, axes={"n": kind(0)})
    assert item == EncoderItemSpec(4, 1, path_output_tokens={"a": 1}, axes={"n": 0})
    assert all(type(size) is int for size in (item.input_size, item.tokens("a"), item.axes["n"]))
    assert EncoderCudaGraphPathConfig(axes={"n": (kind(4), 2)}).axes == {"n": (2, 4)}
    batch = Batch(kind(3), kind(3), {}, kind(1), num_active_loras=kind(0))
    assert batch == Batch(3, 3, {}, 1)
    assert type(batch.num_tokens) is type(batch.max_query_len) is int
    assert CompilationConfig(num_warmups=kind(2)).num_warmups == 2
    with set_forward_context(num_unpadded_tokens=kind(2)) as context:
        assert context.num_unpadded_tokens == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_manager_takes_a_batch_of_any_whole_numbers(
    kind: Callable[[int], Any], device: str
) -> None:
    model = layers(device)
    manager = front_end("CudaGraphManager", model, device).target
    manager.capture()
    for rows in (3, ROWS, 1):
        x = torch.randn(rows, WIDTH, device=device)
        result = manager.run(Batch(kind(rows), kind(rows), {"x": x}))
        torch.testing.assert_close(result, model(x))
    assert manager.counters.replays >= 3


def test_an_input_buffer_takes_sizes_of_any_whole_numbers() -> None:
    buffer = InputBuffer("x", ("tokens", np.int64(WIDTH)), torch.float32)
    assert buffer == InputBuffer("x", ("tokens", WIDTH), torch.float32)
    assert all(type(size) in (int, str) for size in buffer.shape)
    assert buffer.dummy(3, 3).shape == (3, WIDTH)
    for size in (-1, True, 3.0, None):
        with pytest.raises(CGCompileError, match="shape"):
            InputBuffer("x", ("tokens", size), torch.float32)
