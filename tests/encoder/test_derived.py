"""Towers without a protocol: what ``from_model`` derives from examples, and what it refuses."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lib.encoders import config
from torch import nn

from cgcompile import verify
from cgcompile.encoder import EncoderCudaGraphManager
from cgcompile.encoder.errors import EncoderError
from cgcompile.errors import ConfigError
from cgcompile.reasons import Reason

C, D, H = 3, 8, 6
Grid = tuple[int, int]


def varlen(x: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
    """Attend within sequences, as a kernel that takes offsets does; unwritten rows are NaN."""
    rows = torch.arange(len(x), device=x.device, dtype=starts.dtype)
    owner = torch.searchsorted(starts, rows, right=True)
    near = (rows[:, None] - rows).abs() < longest  # a kernel would read no further
    scores = (x @ x.T).masked_fill((owner[:, None] != owner) | ~near, float("-inf"))
    attended = scores.softmax(-1) @ x
    return torch.where(
        (rows < starts[-1])[:, None], attended, torch.full_like(attended, float("nan"))
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return x + varlen(self.linear(x), cu_seqlens, max_seqlen)


class Tower(nn.Module):
    """Computes all that depends on grids itself, from numbers that it reads on the host."""

    def __init__(self, change: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.places = nn.Linear(C, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.merge = nn.Linear(4 * D, H)
        self.change = change  # what a test makes wrong: x, grids -> x

    def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Any:
        columns, sizes, order, before = [], [0], [], 0
        for h, w in grid.tolist():
            columns.append(torch.arange(w).repeat(h))
            sizes.append(h * w)
            order.append(torch.arange(h * w // 4).flip(0) + before)
            before += h * w // 4
        starts = torch.tensor(sizes, device=grid.device).cumsum(0).to(torch.int32)
        x = self.embed(pixel_values) + self.places(torch.cat(columns).to(grid.device))
        if self.change is not None:
            x = self.change(x, grid)
        for block in self.blocks:
            x = block(x, cu_seqlens=starts, max_seqlen=int(starts.diff().max()))
        x = self.merge(x.view(-1, 4 * D))
        order = torch.cat(order).to(grid.device)
        return (x[order] * torch.arange(1, H + 1, device=x.device))[torch.argsort(order)]


class Ending(nn.Module):
    """One host value, a module, and an end that a test gives: x, grid -> x."""

    def __init__(self, end: Callable[..., Any], middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.places = nn.Linear(C, D), nn.Embedding(64, D)
        self.middle = nn.Linear(D, D) if middle is None else middle
        self.end = end

    def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Any:
        columns = torch.cat([torch.arange(w).repeat(h) for h, w in grid.tolist()])
        x = self.embed(pixel_values) + self.places(columns.to(pixel_values.device))
        return self.end(self.middle(x), grid)


def unchanged(x: torch.Tensor, grid: Any = None) -> torch.Tensor:
    return x


class Calling(nn.Linear):
    """A layer that calls a function before it runs."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.before: Callable[[], Any] = list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        return super().forward(x)


def call(*grids: Grid, device: str = "cpu") -> dict[str, Any]:
    rows = torch.randn(sum(h * w for h, w in grids), C, device=device)
    return {"pixel_values": rows, "grid": torch.tensor(grids)}


SIZES: tuple[Grid, ...] = ((2, 2), (4, 4), (2, 6))
MIXES: tuple[Sequence[Grid], ...] = (
    [(2, 8)],
    [(4, 4), (2, 2), (6, 6)],
    [(2, 14), (4, 2), (4, 4), (8, 2)],
    [(6, 10)],
)


def derived(
    tower: Any, device: str = "cpu", examples: Any = None, **more: Any
) -> EncoderCudaGraphManager:
    """Return a captured manager of a derived tower."""
    examples = [call(size, device=device) for size in SIZES] if examples is None else examples
    settings = {"config": config(device, debug="poison"), "token_budgets": [8, 16, 32], **more}
    encoder = EncoderCudaGraphManager.from_model(tower.to(device).eval(), examples, **settings)
    assert encoder.capture().missing == ()
    return encoder


def alone(tower: Any, mixed: dict[str, Any], counts: Sequence[int]) -> list[Any]:
    """Run a tower eagerly on each item of a call."""
    parts = zip(mixed["pixel_values"].split(list(counts)), mixed["grid"], strict=True)
    with torch.inference_mode():
        return [tower(rows, grid=grid[None].to(rows.device)) for rows, grid in parts]


def check(encoder: EncoderCudaGraphManager, tower: Any, *grids: Grid, device: str = "cpu") -> None:
    mixed = call(*grids, device=device)
    expected = alone(tower, mixed, [h * w for h, w in grids])
    results = encoder.execute(mixed)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
    assert all(result.abs().max() > 1e-2 for result in results)


def test_a_tower_that_reads_grids(device: str) -> None:
    """Tables, a permutation, offsets and a longest sequence; grids that no example has."""
    tower = Tower()
    encoder = derived(tower, device)
    for grids in MIXES * 2:
        check(encoder, tower, *grids, device=device)
    assert (encoder.statistics.hits, encoder.statistics.misses) == (18, 0)
    assert encoder.counters.replays >= 8
    assert verify(encoder, call(*MIXES[1], device=device))
    shown = repr(encoder.model)
    assert "input of places: table by patches" in shown
    assert "cu_seqlens: offsets by patches" in shown
    assert "permutation by tokens" in shown
    assert "max_seqlen" not in shown


def test_what_is_too_large_runs_the_tower_itself(device: str) -> None:
    tower = Tower()
    encoder = derived(tower, device)
    check(encoder, tower, (4, 4), (20, 8), device=device)
    assert encoder.statistics.reasons() == {Reason.OVERSIZE: 1}
    check(encoder, tower, (4, 4), device=device)
    assert encoder.statistics.hits == 2


def test_no_hooks_are_left_and_nothing_is_computed_again() -> None:
    tower, reads = Tower(), []
    encoder = derived(tower)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in tower.modules())
    tower.embed.register_forward_hook(lambda *_: reads.append(1))
    for _ in range(3):
        encoder.execute(call((2, 10), (4, 6)))
    assert len(reads) == 2  # each new grid once; replays run no Python


def test_grids_as_lists_and_a_function() -> None:
    tower = Tower()
    encoder = EncoderCudaGraphManager.from_model(
        lambda pixel_values, sizes: tower(pixel_values, torch.tensor(sizes)),
        [{"pixel_values": call(size)["pixel_values"], "sizes": [size]} for size in SIZES],
        token_budgets=[16],
        config=config(),
    )
    assert encoder.capture().missing == ()
    mixed = call((2, 4), (4, 4))
    results = encoder.execute({"pixel_values": mixed["pixel_values"], "sizes": [(2, 4), (4, 4)]})
    torch.testing.assert_close(results, alone(tower, mixed, [8, 16]), rtol=1e-4, atol=1e-4)
    assert encoder.statistics.misses == 0


def test_no_items_and_another_order(device: str) -> None:
    tower = Tower()
    encoder = derived(tower, device)
    mixed = call((2, 2), (4, 4), (2, 6), device=device)
    expected = encoder.execute(mixed)
    chosen = encoder.model.select_encoder_cudagraph_items(mixed, [2, 0])
    torch.testing.assert_close(encoder.execute(chosen), [expected[2], expected[0]])
    assert encoder.execute(encoder.model.select_encoder_cudagraph_items(mixed, [])) == []


# ---------------------------------------------------------------- tiles, items of one size


class Tiles(nn.Module):
    """Tiles [k, C, 2, 2] to 4 rows each; the grid of tiles is not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(C, H)

    def forward(self, pixel_values: torch.Tensor, grid: Any) -> Any:
        x = self.linear(pixel_values.flatten(2).transpose(1, 2))
        return {"rows": F.scaled_dot_product_attention(x, x, x)}


def tiles(*grids: Grid, device: str = "cpu") -> dict[str, Any]:
    rows = torch.randn(sum(h * w for h, w in grids), C, 2, 2, device=device)
    return {"pixel_values": rows, "grid": torch.tensor(grids)}


def test_tiles_with_separators(device: str) -> None:
    """Results have a row more for each line of tiles, which graphs do not have."""
    tower = Tiles().to(device)

    def separated(rows: torch.Tensor, item: dict[str, Any]) -> torch.Tensor:
        lines = rows.view(len(item["grid"]) * int(item["grid"][0, 0]), -1, H)
        return torch.cat((lines, lines.new_ones(len(lines), 1, H)), 1).flatten(0, 1)

    examples = [tiles(size, device=device) for size in ((1, 1), (2, 3))]
    encoder = derived(tower, device, examples, combine=separated)
    grids = [(2, 2), (1, 3), (3, 1)]
    for _ in range(2):
        mixed = tiles(*grids, device=device)
        results = encoder.execute(mixed)
        parts = mixed["pixel_values"].split([h * w for h, w in grids])
        for mine, part, (h, w) in zip(results, parts, grids, strict=True):
            lines = tower(part, None)["rows"].reshape(h, 4 * w, H)
            expected = torch.cat((lines, lines.new_ones(h, 1, H)), 1).flatten(0, 1)
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert (encoder.statistics.hits, encoder.statistics.misses) == (6, 0)


def test_one_size_may_read_anything_of_it(device: str) -> None:
    """Host values are constants then: attention that splits by length, branches, numbers."""

    class Split(Tower):
        def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Any:
            lengths = (grid[:, 0] * grid[:, 1]).tolist()
            x = self.embed(pixel_values) * (grid.sum() / len(grid))
            return self.merge(
                torch.cat([part - part.mean(0) for part in x.split(lengths)]).view(-1, 4 * D)
            )

    tower = Split()
    encoder = derived(tower, device, [call((4, 2), device=device)])
    for count in (1, 5, 3):
        check(encoder, tower, *[(4, 2)] * count, device=device)
    assert encoder.statistics.misses == 0
    with pytest.raises(EncoderError, match=r"item 1 is \(\(2, 4\),\); expected \(\(4, 2\),\)"):
        encoder.execute(call((4, 2), (2, 4), device=device))


# ---------------------------------------------------------------- refusals


def refused(match: str, tower: Any = None, examples: Any = None, **more: Any) -> None:
    with pytest.raises(EncoderError, match="(?s)" + match):
        derived(Tower() if tower is None else tower, examples=examples, **more)


def changed(change: Callable[..., Any], match: str) -> None:
    refused(match, Tower(change))


def test_numbers_that_depend_on_sizes() -> None:
    changed(lambda x, grid: x * int(grid[0, 1]), r"mul gets 4; 2 for the smallest")
    changed(lambda x, grid: x.clamp(max=float(grid.sum())), r"clamp gets 8.0; 4.0")


def test_branches_and_loops_over_items() -> None:
    changed(
        lambda x, grid: x.tanh() if grid[0, 1] > 2 else x, r"calls tanh where it calls blocks.0"
    )
    changed(
        lambda x, grid: torch.cat(x.split(grid.prod(1).tolist())),
        r"fails on the rows of the smallest example.*split_sizes",
    )


def test_reads_of_the_device() -> None:
    changed(lambda x, grid: x * x.sum().item(), r"item\(\) reads a tensor \[\] on the host")

    class Reading(Block):
        def forward(self, x: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
            return torch.cat([p - p.mean(0) for p in x.split(cu_seqlens.diff().tolist())])

    tower = Tower()
    tower.blocks[1] = Reading()
    refused(r"blocks.1.tolist\(\) reads.*flash_attention_2", tower)


def test_values_without_a_rule() -> None:
    def squares(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return (
            x + torch.eye(int(grid.prod(1).sum()))[:, :1]
        )  # the first row of a call, not of an item

    changed(squares, r"cannot derive 'add'.*\[\[4, 1\], \[16, 1\], \[12, 1\]\]")


def test_values_of_the_number_of_rows() -> None:
    changed(lambda x, grid: x + torch.ones(len(x), 1), r"cannot derive 'add' of shape \[16, 1\]")


def test_padding_and_other_items_that_reach_the_rows_of_an_item() -> None:
    changed(lambda x, grid: x - x.mean(0), r"items \(\d.*differ from eager by")


class Applying(nn.Module):
    """A layer, and a function of its rows that a test gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.places, self.out = nn.Linear(C, D), nn.Embedding(8, D), nn.Linear(D, H)
        self.function = function

    def forward(self, pixel_values: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.out(self.function(self, self.embed(pixel_values), pixel_values, **more))


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a scale of all rows": lambda x: x / x.abs().amax(),
    "a scale of all rows behind a norm": lambda x: F.layer_norm(x, (D,)) / x.abs().amax(),
    "quantised with one scale": lambda x: (x / x.abs().amax() * 7).round() / 7 * x.abs().amax(),
    "the first row": lambda x: x + x[:1],
}


@pytest.mark.parametrize("example", [torch.randn, torch.zeros, torch.ones, torch.rand])
@pytest.mark.parametrize("mix", MIXING)
def test_one_example_that_is_packed_with_itself(mix: str, example: Any) -> None:
    """Equal items would have equal results; an example may also be all zeros."""
    torch.manual_seed(5)
    tower = Applying(lambda _, x, rows: MIXING[mix](x))
    for dtype in (torch.float32, torch.bfloat16):
        refused(
            r"items \(0, 0, 0\) of the examples \(all but the first with varied.*differ from eager",
            tower.to(dtype),
            [{"pixel_values": example(4, C)}],
        )


def test_examples_with_equal_numbers() -> None:
    examples = [{**call(size), "pixel_values": torch.zeros(size[0] * size[1], C)} for size in SIZES]
    for mix in MIXING:
        refused(
            r"items \(\d.*differ from eager",
            Ending(lambda x, grid, mix=mix: MIXING[mix](x)),
            examples,
        )


def test_items_that_are_mixed_on_large_budgets_alone() -> None:
    tower = Applying(lambda _, x, rows: x / x.abs().amax() if len(x) > 40 else x)
    example = {"pixel_values": torch.randn(4, C)}
    derived(tower, examples=[example], token_budgets=[8, 40])
    refused(
        r"items \(0, 0, 0\) .* on a budget of 64",
        tower,
        [example],
        token_budgets=[8, 64],
    )


SENSITIVE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a logarithm of positive numbers": (
        lambda own, x, rows: x + rows.log().mean(-1, True),
        torch.rand,
    ),
    "an index that is a float": (
        lambda own, x, rows: x + own.places(rows[:, 0].long()),
        lambda *shape: torch.randint(0, 8, shape).float(),
    ),
    "a mask that adds infinity": (
        lambda own, x, rows: (x + rows[:, :1].log()).softmax(-1).nan_to_num(),
        lambda *shape: torch.randint(0, 2, shape).float(),
    ),
    "numbers that are nearly 0": (lambda own, x, rows: x * 1e-7, torch.randn),
    "a difference of large numbers": (lambda own, x, rows: x + 1000 - 1000, torch.randn),
    "the largest of a row": (
        lambda own, x, rows: F.one_hot(x.argmax(-1), D).to(x) + x,
        torch.randn,
    ),
    "a high power": (lambda own, x, rows: x**6, torch.randn),
    "a scale for each row": (lambda own, x, rows: x / x.abs().amax(-1, True), torch.randn),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SENSITIVE)
def test_towers_that_treat_rows_alone_are_served(
    name: str, dtype: torch.dtype, device: str
) -> None:
    function, make = SENSITIVE[name]
    torch.manual_seed(6)
    tower = Applying(function).to(dtype)
    inputs = lambda items: {"pixel_values": make(4 * items, C).to(device, dtype)}  # noqa: E731
    encoder = derived(tower, device, [inputs(1)])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for items in (3, 1, 4):
        mixed = inputs(items)
        with torch.inference_mode():
            expected = [tower(part) for part in mixed["pixel_values"].split(4)]
        for result, other in zip(encoder.execute(mixed), expected, strict=True):
            assert (result - other).abs().max() <= tolerance * other.abs().max()
    assert (encoder.statistics.hits, encoder.statistics.misses) == (8, 0)


def test_tables_made_by_numpy() -> None:
    """No mode of torch sees ``torch.from_numpy``."""

    def columns(grid: torch.Tensor) -> np.ndarray:
        tables = [np.tile(np.arange(w, dtype=np.float32), h) for h, w in grid.tolist()]
        return np.concatenate(tables)[:, None]

    for make in (torch.tensor, torch.as_tensor):
        tower = Ending(lambda x, grid, make=make: x + make(columns(grid)))
        encoder = derived(tower, token_budgets=[16, 64])
        for grids in MIXES:
            check(encoder, tower, *grids)
        assert (encoder.statistics.hits, encoder.statistics.misses) == (9, 0)
    tower = Ending(lambda x, grid: x + torch.from_numpy(columns(grid)))
    refused(r"torch\.as_tensor where they are numpy's", tower)


def test_integer_rows_keep_their_range(device: str) -> None:
    def function(own: Applying, x: torch.Tensor, rows: torch.Tensor, kind: Any) -> torch.Tensor:
        return x + own.places(kind)

    def inputs(items: int) -> dict[str, Any]:
        rows = torch.randn(4 * items, C, device=device)
        return {"pixel_values": rows, "kind": torch.randint(0, 8, (4 * items,), device=device)}

    tower = Applying(function)
    encoder = derived(tower, device, [inputs(1)])
    mixed = inputs(4)
    with torch.inference_mode():
        expected = tower(**mixed).split(4)
    torch.testing.assert_close(encoder.execute(mixed), list(expected), rtol=1e-4, atol=1e-4)
    assert encoder.statistics.hits == 4


def test_calls_that_depend_on_the_number_of_rows() -> None:
    """They are found at capture, on the budget that has as many."""
    match = r"items \(0, 0, 0\) of the examples.* on a budget of 128 tokens.*differ from eager by"
    sizes = {"token_budgets": [32, 128, 256]}
    one = {"examples": [call((2, 2))], **sizes}
    ends: list[Callable[..., Any]] = [
        lambda x, grid: x.tanh() if 100 < len(x) < 200 else x,
        lambda x, grid: x * (1.5 if 100 < len(x) < 200 else 1.0),
    ]
    for end in ends:
        refused(match, Ending(end), **sizes)
        refused(match, Ending(end), **one)

    class Rows(nn.Linear):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return ends[0](super().forward(pixel_values), None)

    refused(match, Rows(C, H), [{"pixel_values": torch.randn(1, C)}], **sizes)


def test_weights_that_are_replaced_before_capture() -> None:
    tower = Tower()
    examples = [call(size) for size in SIZES]
    options = {"token_budgets": [8, 16], "config": config()}
    encoder = EncoderCudaGraphManager.from_model(tower, examples, **options)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.5)
    assert encoder.capture().missing == ()
    check(encoder, tower, (4, 4), (2, 6))


def test_budgets_below_the_smallest_example() -> None:
    examples = [call((4, 4)), call((4, 8))]
    match = "a budget of 2 tokens is below the smallest example, of 4,"
    refused(match, examples=examples, token_budgets=[2, 32])
    derived(Tower(), examples=examples, token_budgets=[4, 32])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.2), (torch.float16, 0.08)])
def test_tolerances_of_16_bit(dtype: torch.dtype, share: float) -> None:
    tower = Ending(lambda x, grid: x * (1 + share / len(x))).to(dtype)  # 4 % and 1.6 %
    refused("differ from eager", tower)
    derived(tower, tolerance=0.1)
    derived(Tower().to(dtype))


@pytest.mark.slow
def test_results_that_are_no_rows() -> None:
    class Several(Tower):
        def forward(self, *args: Any, **named: Any) -> Any:
            tokens = super().forward(*args, **named)
            return {"tokens": tokens, "all": tokens.sum(0)}

    refused(r"returned tokens, all; expected one tensor.*output=", Several())
    output: Callable[[Any], Any] = lambda found: found["all"]  # noqa: E731
    refused(r"returned shapes \[\[6\], \[6\]\]", Several(), output=output)
    output = lambda found: found["tokens"]  # noqa: E731
    derived(Several(), output=output)
    encoder = derived(Several(), output=lambda found: (found["tokens"], found["tokens"] * 2))
    one, two = encoder.execute(call((4, 4)))[0]
    torch.testing.assert_close(one * 2, two)


def test_rows_without_a_ratio() -> None:
    class Odd(Tower):
        def forward(self, *args: Any, **named: Any) -> Any:
            grid = named["grid"] if "grid" in named else args[1]
            parts = super().forward(*args, **named).split((grid.prod(1) // 4).tolist())
            return torch.cat([torch.cat((part, part[:1])) for part in parts])

    refused(r"examples of \[4, 16, 12\] rows have results of \[2, 5, 4\] rows", Odd())


def test_examples_that_are_no_items() -> None:
    tower, one = Tower(), call((2, 2))
    with pytest.raises(ConfigError, match="example_items"):
        derived(tower, examples=[])
    with pytest.raises(ConfigError, match="example_items"):
        derived(tower, examples=[one["pixel_values"]])
    refused(r"an example is \['pixel_values'\]", examples=[one, {"pixel_values": torch.ones(4, C)}])
    refused(r"\['grid'\]; expected an input of floating point", examples=[{"grid": one["grid"]}])
    refused(r"'grid' is of \[2, 1\] rows", examples=[call((2, 2), (2, 2)), one])
    other = {"pixel_values": torch.ones(4, C + 1), "grid": one["grid"]}
    refused(r"a row of 'pixel_values' is \[3\] in one item and \[4\]", examples=[one, other])
    modes = [{**one, "mode": mode} for mode in "ab"]
    refused("'mode' is 'a'", examples=modes)


class Named(Ending):
    """Also gets a number by item, and constants."""

    def forward(self, seconds: Any, pixel_values: Any, grid: Any, scale: Any, factor: Any) -> Any:
        counts = grid.prod(1)
        shift = torch.repeat_interleave((seconds * 30).long(), counts)[:, None]
        x = super().forward(pixel_values, grid) + shift.to(pixel_values)
        return x * float(scale[1]) * factor


def named(*grids: Grid, **other: Any) -> dict[str, Any]:
    seconds = torch.tensor([1.37 + h for h, _ in grids])
    constants = {"scale": np.array([1.0, 2.0]), "factor": torch.tensor(0.5)}
    return {"seconds": seconds, **call(*grids), **constants, **other}


def test_floats_by_item_and_constant_arrays() -> None:
    tower = Named(unchanged).to(torch.bfloat16)
    encoder = derived(tower, examples=[named(size) for size in SIZES])
    assert "seconds" not in repr(encoder.model)
    mixed = named((4, 6), (2, 4))
    mixed["pixel_values"] = mixed["pixel_values"].to(torch.bfloat16)
    results = encoder.execute(mixed)
    assert encoder.statistics.hits == 2
    expected = tower(**mixed).split([24, 8])
    torch.testing.assert_close(results, list(expected), rtol=2e-2, atol=2e-2)
    with pytest.raises(EncoderError, match="scale is array"):
        encoder.execute(named((2, 2), scale=np.array([1.0, 3.0])))
    with pytest.raises(EncoderError, match=r"factor is 0\.5"):
        encoder.execute(named((2, 2), factor=0.5))


def test_constants_that_differ() -> None:
    both = "expected a tensor or list of one entry for the item, or the same in all"
    for name, value in (("scale", np.ones(2)), ("scale", np.ones(3)), ("factor", torch.ones(()))):
        examples = [named((2, 2)), named((4, 4), **{name: value})]
        refused(f"{name!r} is .*{both}", Named(unchanged), examples)
    tables = [call((2, 2)) | {"scale": [torch.ones(2), torch.ones(2)]} for _ in range(2)]
    tables[1]["scale"][1] = torch.zeros(2)
    refused(f"'scale' is .*{both}", Named(unchanged), tables)


def test_items_of_unknown_rows() -> None:
    class Rows(nn.Linear):
        def forward(self, pixel_values: Any, kind: Any = None) -> Any:
            return super().forward(pixel_values)

    examples = [{"pixel_values": torch.ones(n, C)} for n in (2, 3)]
    refused(r"items have \[2, 3\] rows, which follow from no input", Rows(C, H), examples)
    for kind in (torch.tensor([[1]]), ["image"]):
        named = [{**example, "kind": kind} for example in examples]
        refused(r"items have \[2, 3\] rows, which follow from no input", Rows(C, H), named)


def test_calls_that_do_not_fit_the_examples() -> None:
    encoder = derived(Tower())
    good = call((2, 2), (4, 4))
    with pytest.raises(EncoderError, match="pixel_values has 20 rows; expected 4"):
        encoder.execute({**good, "grid": good["grid"][:1]})
    with pytest.raises(EncoderError, match="no 'grid'"):
        encoder.execute({"pixel_values": good["pixel_values"]})
    with pytest.raises(EncoderError, match="mask is no input of the examples"):
        encoder.execute({**good, "mask": None})
    with pytest.raises(EncoderError, match="item 1 has 9 rows; expected a multiple of 4"):
        encoder.execute(call((2, 2), (3, 3)))
    check(encoder, encoder.model.tower, (2, 2), (4, 4))


@pytest.mark.slow
def test_new_sizes_that_behave_differently() -> None:
    """A branch that no example took is found when an item takes it."""
    tower = Tower(lambda x, grid: x.tanh() if grid.max() > 10 else x)
    encoder = derived(tower)
    check(encoder, tower, (2, 10))
    with pytest.raises(EncoderError, match=r"calls tanh where it calls blocks\.0"):
        encoder.execute(call((2, 12)))

    tower = Tower(lambda x, grid: x * torch.where(grid.max() > 10, 2.0, 1.0))
    encoder = derived(tower)
    with pytest.raises(EncoderError, match=r"'mul' has shape .* no longer the constant"):
        encoder.execute(call((2, 12)))
    check(encoder, tower, (2, 10))


def test_new_sizes_that_behave_differently_behind_the_last_host_value() -> None:
    def refused_later(tower: Any, match: str) -> None:
        encoder = derived(tower)
        check(encoder, tower, (2, 10))
        for grids in ([(2, 12)], [(4, 4), (2, 12)]):
            with pytest.raises(EncoderError, match=match):
                encoder.execute(call(*grids))
        check(encoder, tower, (2, 10), (4, 4))

    end = lambda x, grid: x.tanh() if grid.max() > 10 else x  # noqa: E731
    refused_later(Ending(end), "calls tanh where it calls nothing")
    end = lambda x, grid: x * max(1.0, float(grid.max()) / 10)  # noqa: E731
    refused_later(Ending(end), r"mul gets 1\.2; 1\.0 for the smallest")

    class Shared(nn.Linear):
        flag = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.tanh() if self.flag else x)

    class Setting(Ending):
        def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Any:
            Shared.flag = int(grid.max()) > 10
            return super().forward(pixel_values, grid)

    refused_later(Setting(unchanged, Shared(D, D)), r"calls middle\.tanh")


def test_a_thread_that_calls_the_tower_meanwhile() -> None:
    results: list[torch.Tensor] = []

    def end(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        if calls and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: results.append(tower(**calls[0])))
            thread.start()
            thread.join()
        return tower.middle(x)

    calls: list[dict[str, Any]] = []
    tower = Ending(end)
    encoder, good = derived(tower), call((2, 6), (4, 4))
    expected = tower(**good)
    calls.append(good)
    for grid in ((2, 8), (2, 10)):
        encoder.execute(call(grid))
    torch.testing.assert_close(results, [expected] * 2)
    calls.clear()
    check(encoder, tower, (2, 8), (2, 10))


def test_modes_of_the_tower_and_around_it() -> None:
    """A run adds a mode of its own, and takes no other off, whatever a module raises."""
    middle = Calling()

    class Default(Ending):
        def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> Any:
            with torch.device("meta"):
                x = self.middle(self.embed(pixel_values))
                assert torch.ones(1).is_meta
            return self.end(x, grid)

    def end(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([torch.arange(w).repeat(h) for h, w in grid.tolist()])[:, None]

    def interrupt() -> None:
        raise KeyboardInterrupt

    tower = Default(end, middle)
    encoder = derived(tower)
    check(encoder, tower, (2, 8))
    middle.before = interrupt
    with torch.device("meta"):
        with pytest.raises(KeyboardInterrupt), torch.device("cpu"):
            encoder.execute(call((2, 10)))
        with pytest.raises(KeyboardInterrupt), torch.device("cpu"):
            encoder.execute(call((4, 10), (4, 10)))
        assert torch.ones(1).is_meta
    assert not torch.ones(1).is_meta
    middle.before = list
    check(encoder, tower, (2, 10))


def test_the_same_host_value_twice_or_two() -> None:
    """Which buffer an op reads is part of the graph."""

    def change(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        rows = int(grid.prod(1).sum())
        one, two = torch.ones(rows, 1), torch.full((rows, 1), 2.0)
        return x * one * two * (two if grid.max() > 10 else one)

    encoder = derived(Tower(change))
    check(encoder, encoder.model.tower, (2, 10))
    with pytest.raises(EncoderError, match="mul gets 'host value 2'; 'host value 1' for"):
        encoder.execute(call((2, 12)))


@pytest.mark.slow
def test_host_values_that_are_no_arguments_of_a_module() -> None:
    """They are lifted where an op inside of the module reads them."""
    shared: dict[str, torch.Tensor] = {}

    def share(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        lengths = grid.prod(1)
        shared["scale"] = torch.repeat_interleave(1.0 / lengths, lengths)[:, None]
        return x

    class Scaled(Block):
        def forward(self, x: torch.Tensor, *args: Any, **named: Any) -> Any:
            return super().forward(x * shared["scale"], *args, **named)

    tower = Tower(share)
    tower.blocks[0] = Scaled()
    encoder = derived(tower)
    for grids in MIXES:
        check(encoder, tower, *grids)
    assert encoder.statistics.misses == 0
    assert "blocks.0.mul: table by patches" in repr(encoder.model)
