"""The protocol for flattened patches: grids, selection, buffers."""

from typing import Any

import pytest
import torch
from lib.encoders import TABLES, C, H, Tower, check, close, images, manager, patches, videos

from cgcompile.encoder import EncoderBuffer, EncoderItemSpec, PatchEncoder, PatchOffsets, PatchTable
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.patches import frame_offsets
from cgcompile.errors import ConfigError
from cgcompile.reasons import Reason


@pytest.mark.parametrize(
    ("grid", "size", "tokens"),
    [
        ((1, 4, 4), 16, 4),
        ((1, 3, 5), 15, 2),
        ((1, 1, 1), 1, 0),
        ((4, 6, 2), 48, 12),
        ((3, 7, 5), 105, 18),
        ((0, 4, 4), 0, 0),
    ],
)
def test_sizes_of_an_item(grid: Any, size: int, tokens: int) -> None:
    for call in ({"video_grid_thw": [grid]}, {"video_grid_thw": torch.tensor([grid])}):
        results = patches(frames=4).get_encoder_cudagraph_item_specs(call)
        assert results == [EncoderItemSpec(size, tokens, frames=grid[0])]


def test_selection() -> None:
    model, call = patches(), images((2, 2), (1, 3), (4, 2))
    parts = call["pixel_values"].split([4, 3, 8])
    results = model.select_encoder_cudagraph_items(call, [2, 0])
    assert torch.equal(results["pixel_values"], torch.cat([parts[2], parts[0]]))
    assert model.grids(results) == [(1, 4, 2), (1, 2, 2)]
    none = model.select_encoder_cudagraph_items(call, [])
    assert list(none["pixel_values"].shape) == [0, C]
    assert model.get_encoder_cudagraph_item_specs(none) == []
    assert model.select_encoder_cudagraph_items(none, []).keys() == none.keys()


def test_an_odd_grid_takes_the_room_of_its_input(device: str) -> None:
    """The tokens would fit a smaller budget, the rows do not."""
    model = patches(device)
    encoder = manager(model, device, token_budgets=[16, 32])
    check(encoder, model, images((8, 8), (1, 15), device=device))
    results = encoder.statistics.as_dict()["graphs"]
    assert [(each["budget"], each["tokens"]) for each in results] == [(16, 16)]
    assert encoder.statistics.idle == 1  # the second has no output, and was not run
    check(encoder, model, images((3, 3), device=device))
    check(encoder, model, images((3, 41), (2, 2), device=device))  # 20 tokens, 123 rows
    assert (encoder.statistics.hits, encoder.statistics.misses) == (4, 0)
    check(encoder, model, images((3, 43), device=device))  # 21 tokens, 129 rows
    assert encoder.statistics.reasons() == {Reason.OVERSIZE: 1}


def test_a_permutation_of_tokens_and_windows(device: str) -> None:
    """Attention in windows: rows change places and come back, offsets of windows beside those of frames."""

    def windows(grids: Any) -> torch.Tensor:
        """One for two rows of each frame."""
        sizes = [2 * w for t, h, w in grids for _ in range(t * (h // 2))]
        return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)

    def reverse(grids: Any) -> torch.Tensor:
        count = sum(t * (h // 2) * (w // 2) for t, h, w in grids)
        return torch.arange(count).flip(0)

    class Windowed(Tower):
        def forward(self, buffers: dict[str, torch.Tensor]) -> Any:
            order = buffers["order"]
            x = super().forward({**buffers, "cu_seqlens": buffers["windows"]})[order]
            return (x * torch.arange(1, H + 1, device=x.device))[torch.argsort(order)]

    torch.manual_seed(4)
    tower = Windowed().to(device)
    model = PatchEncoder(
        tower,
        merge_size=2,
        in_features=C,
        out_hidden_size=H,
        tables={**TABLES, "order": PatchTable(reverse, (), torch.int64, "tokens", "positions")},
        offsets={
            "cu_seqlens": PatchOffsets(frame_offsets),
            "windows": PatchOffsets(windows, lambda budget, items, frames: budget, 16),
        },
        max_frames_per_video=3,
    )
    assert model.get_encoder_cudagraph_budget_range(None) == (64, 4096)
    encoder = manager(model, device)
    for call in (
        images((4, 4), (2, 6), device=device),
        videos((3, 4, 2), (1, 8, 8), device=device),
    ):
        check(encoder, model, call)
    assert (encoder.statistics.hits, encoder.statistics.misses) == (4, 0)
    key = encoder.budget_graphs[0]
    order = encoder.graph_inputs(key)["order"]
    assert sorted(order.tolist()) == list(range(key.budget))


MOST_FRAMES = 4


def slots(grids: Any) -> torch.Tensor:
    """Return int64 [tokens, 4]: for each token the rows of all its frames, from 1; 0 is unused."""
    rows, start = [], 1
    for t, h, w in grids:
        tokens = h // 2 * (w // 2)
        for cell in range(tokens):
            rows.append([start + frame * tokens + cell for frame in range(t)] + [0] * (4 - t))
        start += t * tokens
    return torch.tensor(rows, dtype=torch.int64).view(-1, MOST_FRAMES)


def lengths(grids: Any) -> torch.Tensor:
    frames = [float(t) for t, h, w in grids for _ in range(h // 2 * (w // 2))]
    return torch.tensor(frames).view(-1, 1)


class Pooling(PatchEncoder):
    """The mean over the frames of each video: a loop over data, rewritten as a table of rows."""

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [
            EncoderItemSpec(t * h * w, (h // 2) * (w // 2), frames=t)
            for t, h, w in self.grids(mm_kwargs)
        ]


@pytest.mark.parametrize(
    "grids", [((1, 4, 4),), ((2, 4, 4),), ((1, 2, 2), (4, 4, 2), (3, 2, 6)), ((4, 4, 4),) * 5]
)
def test_a_temporal_mean_equals_its_loop(grids: Any, device: str) -> None:
    torch.manual_seed(5)
    frame = torch.nn.Linear(4 * C, H).to(device)

    def forward(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        x = frame(buffers["pixel_values"].view(-1, 4 * C))
        x = torch.cat([x.new_zeros(1, H), x])  # the dead slot
        return x[buffers["slots"]].sum(1) / buffers["lengths"].clamp(min=1)

    model = Pooling(
        forward,
        merge_size=2,
        in_features=C,
        out_hidden_size=H,
        tower=frame,
        tables={
            "slots": PatchTable(slots, (MOST_FRAMES,), torch.int64, "tokens"),
            "lengths": PatchTable(lengths, (1,), torch.float32, "tokens"),
        },
        offsets={},
        max_frames_per_video=MOST_FRAMES,
    )
    encoder = manager(model, device)
    for _ in range(2):
        call = videos(*grids, device=device)
        results = encoder.execute(call)
        parts = call["pixel_values_videos"].split([t * h * w for t, h, w in grids])
        for mine, rows, (t, h, w) in zip(results, parts, grids, strict=True):
            expected = frame(rows.view(-1, 4 * C)).view(t, h // 2 * (w // 2), H).mean(0)
            close(mine, expected)
    assert (encoder.statistics.hits, encoder.statistics.misses) == (2 * len(grids), 0)


def test_a_given_eager_forward() -> None:
    seen = []

    class Mine(PatchEncoder):
        def encoder_eager_forward(self, mm_kwargs: Any, *, path: str = "default") -> torch.Tensor:
            seen.append(self.grids(mm_kwargs))
            return torch.full((225, H), 3.0)

    model = Mine(Tower(), merge_size=2, in_features=C, out_hidden_size=H, tables=TABLES)
    model.odd_grids = True
    results = manager(model).execute(images((30, 30)))
    assert torch.equal(results[0], torch.full((225, H), 3.0))
    assert seen == [[(1, 30, 30)]]


def test_an_eager_run_reads_the_grids_once_more(device: str) -> None:
    """Each time may wait for the device: once for the items, once for the buffers."""
    model, read = patches(device), []
    grids = model.grids
    model.grids = lambda call: read.append(1) or grids(call)  # type: ignore[method-assign]
    manager(model, device).execute(images((30, 30), device=device))
    assert len(read) == 2


@pytest.mark.parametrize("rows", [9, 20])
@pytest.mark.parametrize("captured", [True, False])
def test_patches_must_match_the_grids(rows: int, captured: bool) -> None:
    """Padding would hide what is missing, and the budget what is too much."""
    encoder = manager(patches(), captured=captured)
    call = {**images((4, 4)), "pixel_values": torch.randn(rows, C)}
    with pytest.raises(EncoderError, match=rf"{rows} rows.*'image_grid_thw' have 16 patches"):
        encoder.execute(call)
    with pytest.raises(EncoderError, match="16 patches"):
        patches().select_encoder_cudagraph_items(call, [0])
    check(encoder, patches(), images((4, 4)))


BAD_GRIDS: dict[str, Any] = {
    "odd": [(1, 3, 3)],
    "second odd": [(1, 0, 0), (1, 9, 1)],
    "negative": [(1, -3, -3)],
    "negative and even": [(1, -4, -4)],
    "two numbers": [(3, 3)],
    "no numbers": [("a", 3, 3)],
    "fractions": [(1.0, 3.0, 3.0)],
    "tensor of fractions": torch.tensor([[1.0, 3.0, 3.0]]),
    "one grid, not a list of them": torch.tensor([1, 3, 3]),
    "a number": torch.tensor(9),
    "none": None,
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("grids", BAD_GRIDS.values(), ids=BAD_GRIDS.keys())
def test_invalid_grids_are_refused_before_anything_runs(grids: Any, captured: bool) -> None:
    model = patches(odd_grids=False)
    encoder = manager(model, captured=captured)
    before = encoder.statistics.as_dict()
    with pytest.raises(EncoderError, match="'image_grid_thw'"):
        encoder.execute({"pixel_values": torch.randn(9, C), "image_grid_thw": grids})
    assert encoder.statistics.as_dict() == before
    check(encoder, model, images((4, 4), (2, 2)))
    assert encoder.statistics.hits == (2 if captured else 0)


def test_calls_without_inputs_are_refused() -> None:
    model = patches(odd_grids=False)
    encoder, call = manager(model), images((4, 4))
    for bad, told in (
        (None, "is a NoneType"),
        ([call], "is a list"),
        ({}, "no 'image_grid_thw'"),
        ({"pixel_values": call["pixel_values"]}, "no 'image_grid_thw'; it has pixel_values"),
        ({"image_grid_thw": call["image_grid_thw"]}, "no 'pixel_values'"),
        ({**call, "pixel_values": [1.0] * 16}, "'pixel_values' is a list"),
        ({**call, "pixel_values": torch.tensor(1.0)}, "'pixel_values' is a Tensor"),
    ):
        with pytest.raises(EncoderError, match=told):
            encoder.execute(bad)  # type: ignore[arg-type]
        check(encoder, model, call)


def test_odd_grids() -> None:
    call = images((4, 4), (3, 5))
    check(manager(patches()), patches(), call)
    with pytest.raises(EncoderError, match=r"item 1 is \[1, 3, 5\].*merge_size = 2"):
        manager(patches(odd_grids=False)).execute(call)


def test_a_forward_without_weights_runs_where_the_patches_are(device: str) -> None:
    def forward(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return (buffers["pixel_values"] * buffers["scale"])[buffers["cells"]].flatten(1)

    model = PatchEncoder(
        forward, merge_size=2, in_features=C, out_hidden_size=4 * C, tables=TABLES, offsets={}
    )
    encoder = manager(model, device, captured=False)
    call = images((4, 4), device=device)
    results = encoder.execute(call)  # tables are encoder on the CPU
    assert results[0].device.type == device
    encoder.capture()
    close(encoder.execute(call), results)


def test_other_names_of_inputs() -> None:
    model = patches(inputs={"image": ("rows", "grids")})
    encoder = manager(model)
    call = images((4, 4), (2, 2))
    named = {"rows": call["pixel_values"], "grids": call["image_grid_thw"].tolist()}
    for mine, other in zip(encoder.execute(named), manager(patches()).execute(call), strict=True):
        close(mine, other)


def test_invalid_tables() -> None:
    for bad in ({"rows": "rows"}, {"tail": "ones"}):
        with pytest.raises(ConfigError, match="PatchTable"):
            PatchTable(frame_offsets, **bad)  # type: ignore[arg-type]


def test_earlier_arguments_work_with_a_warning() -> None:
    def eager(pixels: torch.Tensor, grids: Any) -> torch.Tensor:
        return pixels.new_full((4, H), 3.0)

    def tail(dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    more: dict[str, Any] = {"eager": eager, "budget_range": (8, 64), "odd_grids": True}
    with pytest.warns(FutureWarning, match="argument .* is deprecated: ") as warned:
        model = PatchEncoder(
            Tower(),
            merge_size=2,
            in_features=C,
            out_hidden_size=H,
            tables=TABLES,
            padding_logics={"scale": tail},
            **more,
        )
    assert [warning.filename for warning in warned] == [__file__] * 4
    assert (model.budget_range, model.odd_grids) == ((8, 64), True)
    rules = model.get_encoder_cudagraph_config().buffers
    assert (rules["scale"].tail, rules["scale"].rows) == (tail, "patches")
    assert rules["positions"].tail == "zeros"
    results = model.encoder_eager_forward(images((4, 4)))
    assert torch.equal(results, torch.full((4, H), 3.0))
    with pytest.warns(FutureWarning, match="padding_logics"):
        config = patches(padding_logics={"pixel_values": tail}).get_encoder_cudagraph_config()
    assert config.buffers["pixel_values"] == EncoderBuffer("patches", tail, rows_per_token=4)


@pytest.mark.parametrize(
    ("name", "bad", "match"),
    [
        ("padding_logics", {"cu_seqlens": print}, "both set what the tail holds"),
        ("padding_logics", {"other": print}, "padding_logics = 'other'"),
        ("padding_logics", [print], "padding_logics = "),
        ("budget_range", 8, "budget_range = 8"),
        ("eager", 3, "eager = 3"),
        ("odd_grids", "no", "odd_grids = 'no'"),
    ],
)
def test_earlier_arguments_that_are_not_valid(name: str, bad: Any, match: str) -> None:
    settings = {"merge_size": 2, "in_features": C, "out_hidden_size": H, name: bad}
    with pytest.warns(FutureWarning, match=name), pytest.raises(ConfigError, match=match):
        PatchEncoder(Tower(), **settings)
