"""Values of a user in typed buffers: integers never become floating point unseen, nor back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.encoders import C, H, Rows, config, images, manager, patches, rows
from torch import nn

import cgcompile
from cgcompile.encoder import EncoderCudaGraphManager, PatchEncoder, PatchOffsets, PatchTable
from cgcompile.errors import CGCompileError
from cgcompile.serving import HostStaging, InputBuffer, StaticInputs

INT, FLOAT = torch.long, torch.bfloat16


def numbers(grids: Any) -> torch.Tensor:
    """Return the number of each patch in its image."""
    return torch.cat([torch.arange(t * h * w) for t, h, w in grids])


class Numbered(nn.Module):
    """Adds a row of a large embedding to each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.line = nn.Embedding(2000, H), nn.Linear(C, H)

    def forward(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.line(buffers["pixel_values"]) + self.embed(buffers["number"].long())


def numbered(**table: Any) -> tuple[Numbered, EncoderCudaGraphManager]:
    torch.manual_seed(3)
    tower = Numbered().eval().to(FLOAT)
    tables = {"number": PatchTable(numbers, **table)}
    shape = {"merge_size": 1, "in_features": C, "out_hidden_size": H}
    encoder = PatchEncoder(tower, tables=tables, offsets={}, **shape)  # type: ignore[arg-type]
    options: dict[str, Any] = {"token_budgets": [512], "config": config()}
    return tower, EncoderCudaGraphManager(encoder, device="cpu", dtype=FLOAT, **options)


def test_a_table_of_integers_stays_one() -> None:
    """In bfloat16 numbers above 256 would be rounded: rows of others, and no error."""
    tower, encoder = numbered(dtype=INT)
    encoder.capture()
    x = torch.randn(400, C).to(FLOAT)
    for eager in (False, True):
        (result,) = encoder.execute(
            {"pixel_values": x, "image_grid_thw": [(1, 20, 20)]}, eager=eager
        )
        with torch.inference_mode():
            expected = tower({"pixel_values": x, "number": torch.arange(400)})
        torch.testing.assert_close(result, expected)
    assert encoder.statistics.hits == 1


def test_a_declared_cast_is_done() -> None:
    _, encoder = numbered(dtype=torch.float32)
    assert encoder.capture().missing == ()
    encoder.execute({"pixel_values": torch.randn(64, C), "image_grid_thw": [(1, 8, 8)]})
    assert encoder.statistics.hits == 1


LINE = nn.Linear(C, H).eval().requires_grad_(False)


def of_a_global(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return LINE(buffers["pixel_values"])


@pytest.mark.parametrize("how", ["a global", "a closure", "tower"])
@pytest.mark.parametrize("size", [8, 40], ids=["replayed", "eager"])
def test_patches_get_the_dtype_of_the_weights_that_the_forward_reads(how: str, size: int) -> None:
    line = LINE
    forward = of_a_global if how == "a global" else lambda buffers: line(buffers["pixel_values"])
    tower = {"tower": line} if how == "tower" else {}
    shape = {"merge_size": 1, "in_features": C, "out_hidden_size": H}
    encoder = PatchEncoder(forward, offsets={}, **shape, **tower)  # type: ignore[arg-type]
    options: dict[str, Any] = {"token_budgets": [64], "config": config()}
    served = EncoderCudaGraphManager(encoder, device="cpu", dtype=torch.float32, **options)
    served.capture()
    x = torch.randn(size * size, C, dtype=torch.float64)
    (result,) = served.execute({"pixel_values": x, "image_grid_thw": [(1, size, size)]})
    torch.testing.assert_close(result, LINE(x.float()))
    assert served.statistics.hits == (size == 8)


def a_table(buffer: torch.dtype, value: torch.dtype) -> Any:
    table = PatchTable(
        lambda grids: numbers(grids).to(value), dtype=buffer if buffer is INT else None
    )
    encoder = patches(tables={**patches()._tables, "number": table})
    return manager(encoder).execute(images((4, 4)))


def late_table(buffer: torch.dtype, value: torch.dtype) -> Any:
    """A table that takes large images alone, so that capture cannot try it."""

    def make(grids: Any) -> torch.Tensor:
        assert len(grids) == 1
        return numbers(grids).to(value)

    table = PatchTable(make, dtype=buffer if buffer is INT else None)
    encoder = manager(patches(tables={**patches()._tables, "number": table}))
    return encoder.execute(images((30, 30)))  # oversize: eager


def offsets(buffer: torch.dtype, value: torch.dtype) -> Any:
    def make(grids: Any) -> torch.Tensor:
        return torch.tensor([0, *(h * w for _, h, w in grids)]).cumsum(0).to(value)

    dtype = torch.int32 if buffer is INT else torch.float32
    encoder = patches(offsets={"cu_seqlens": PatchOffsets(make, dtype=dtype)})
    return manager(encoder).execute(images((4, 4)))


def pixels(buffer: torch.dtype, value: torch.dtype) -> Any:
    return replaced(patches(), buffer, value)


def eager_pixels(buffer: torch.dtype, value: torch.dtype) -> Any:
    return replaced(patches(), buffer, value, (30, 30))


def replaced(model: Any, buffer: torch.dtype, value: torch.dtype, size: Any = (4, 4)) -> Any:
    call = images(size)
    call["pixel_values"] = call["pixel_values"].to(value)
    if buffer is INT:
        pytest.skip("patches are of floating point")
    return manager(model).execute(call)


def own_protocol(buffer: torch.dtype, value: torch.dtype) -> Any:
    if buffer is INT:
        pytest.skip("its rows are of floating point")
    call = rows(5)
    return manager(Rows()).execute({**call, "x": call["x"].to(value)})


def engine_buffer(buffer: torch.dtype, value: torch.dtype) -> Any:
    held = StaticInputs([InputBuffer("x", ("tokens",), buffer)], 8, 8, "cpu")
    return held.stage({"x": torch.ones(4, dtype=value)}, (4, 4), (8, 8))


def host_staging(buffer: torch.dtype, value: torch.dtype) -> Any:
    return HostStaging(torch.zeros(8, dtype=buffer)).fill(torch.ones(4, dtype=value))


PLACES = (a_table, late_table, offsets, pixels, eager_pixels, own_protocol, engine_buffer)


@pytest.mark.parametrize("kinds", [(INT, torch.float32), (FLOAT, INT)], ids=["to int", "to float"])
@pytest.mark.parametrize("fill", [*PLACES, host_staging], ids=lambda place: place.__name__)
def test_no_value_changes_its_kind(
    fill: Callable[[torch.dtype, torch.dtype], Any], kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    with pytest.raises(CGCompileError, match=r"int64|float|dtype"):
        fill(*kinds)


@pytest.mark.parametrize("value", [torch.uint8, torch.int32, torch.long])
def test_the_error_names_the_buffer_and_the_dtype_to_give(value: torch.dtype) -> None:
    with pytest.raises(CGCompileError, match=r"'number'.*torch\.float32(.|\n)*dtype=torch\.long"):
        a_table(torch.float32, value)


def test_verify_takes_a_table_of_integers() -> None:
    _, encoder = numbered(dtype=INT)
    encoder.capture()
    call = {"pixel_values": torch.randn(400, C), "image_grid_thw": [(1, 20, 20)]}
    assert cgcompile.verify(encoder, call).ok
