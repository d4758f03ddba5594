"""Replay buffers have the rows of their items: padding would hide what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lib.encoders import (
    TABLES,
    C,
    H,
    Rows,
    check,
    config,
    images,
    manager,
    patches,
    positions,
    rows,
    videos,
)

from cgcompile.encoder import (
    EncoderBuffer,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphReplayBuffers,
    PatchOffsets,
    PatchTable,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.patches import Grid, frame_offsets
from cgcompile.encoder.protocol import EncoderCudaGraphConfig, EncoderItemSpec, check_values
from cgcompile.errors import ConfigError

Make = Callable[[Sequence[Grid]], Any]
SIZES = ((4, 4), (2, 6))  # 28 patches, 7 tokens


class Switched:
    """A function of grids that may be replaced after the capture, which calls it too."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def __call__(self, grids: Sequence[Grid]) -> Any:
        return self.make(grids)


def lengths(grids: Sequence[Grid]) -> torch.Tensor:
    return torch.tensor([t * h * w for t, h, w in grids], dtype=torch.int32)


def longer(make: Make) -> Make:
    return lambda grids: torch.cat([make(grids), make(grids)[-1:]])


cells = TABLES["cells"].make
ANY = PatchOffsets(frame_offsets, most=lambda tokens, items, frames: frames)
ONE = PatchOffsets(frame_offsets)
# By name: the buffer, what its function returns in place of the right value, and the words.
WRONG: dict[str, tuple[str, Any, Make, str]] = {
    "row short": ("positions", None, lambda g: positions(g)[:-1], r"\[27, 2\].* expected 28 rows"),
    "row too many": ("positions", None, longer(positions), r"\[29, 2\].* expected 28 rows"),
    "first item": ("positions", None, lambda g: positions(g[:1]), r"\[12, 2\].* expected 28 rows"),
    "no rows": ("positions", None, lambda g: positions([]), r"\[0, 2\].* expected 28 rows"),
    "token short": ("cells", None, lambda g: cells(g)[1:], r"\[6, 4\].* expected 7 rows.*tokens"),
    "columns": ("positions", None, lambda g: positions(g)[:, :1], r"\[28, 1\].*\[patches, 2\]"),
    "flat": ("positions", None, lambda g: positions(g)[:, 0], r"\[28\].*\[patches, 2\]"),
    "dtype": ("positions", None, lambda g: positions(g) / 2, "float32.*of int64"),
    "a list": ("positions", None, lambda g: positions(g).tolist(), "the value is list"),
    "lengths": ("cu_seqlens", ONE, lengths, "2 offsets; expected 3, one sequence for each frame"),
    "entry short": ("cu_seqlens", ONE, lambda g: frame_offsets(g)[:-1], "2 offsets; expected 3"),
    "entry too many": ("cu_seqlens", ONE, longer(frame_offsets), "4 offsets; expected 3"),
    "not from 0": ("cu_seqlens", ONE, lambda g: frame_offsets(g) + 1, "1 at first.*from 0 to 28"),
    "decreasing": ("cu_seqlens", ONE, lambda g: torch.tensor([0, 16, 12]), "decreasing"),
    "before the end": ("cu_seqlens", ONE, lambda g: torch.tensor([0, 16, 27]), "27 at last"),
    "behind the end": ("cu_seqlens", ONE, lambda g: torch.tensor([0, 16, 29]), "29 at last"),
    "fractions": ("cu_seqlens", ONE, lambda g: frame_offsets(g).float(), r"\[3\] of float32"),
    "square": ("cu_seqlens", ONE, lambda g: frame_offsets(g)[:, None], r"\[3, 1\] of int32"),
    "any: lengths": ("cu_seqlens", ANY, lengths, "12 at first"),
    "any: one entry": ("cu_seqlens", ANY, lambda g: frame_offsets(g)[:1], "1 offsets.*at least 2"),
    "any: entry short": ("cu_seqlens", ANY, lambda g: frame_offsets(g)[:-1], "12 at last"),
}


def contents(encoder: Any) -> list[torch.Tensor]:
    keys = encoder.budget_graphs
    return [each.clone() for key in keys for each in encoder.graph_inputs(key).values()]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_before_anything_runs(case: str, captured: bool) -> None:
    key, offsets, wrong, words = WRONG[case]
    spec = offsets or TABLES[key]
    right, ran = spec.make, []
    function = Switched(right)
    spec = replace(spec, make=function)
    kind = "tables" if offsets is None else "offsets"
    model = patches(**{kind: {**(TABLES if offsets is None else {}), key: spec}})
    encoder = manager(model, captured=captured)
    call = images(*SIZES)
    check(encoder, model, call)
    before, counts = contents(encoder), encoder.statistics.as_dict()
    model.tower.register_forward_pre_hook(lambda *_: ran.append(1))  # type: ignore[union-attr]
    function.make = wrong
    with pytest.raises(EncoderError, match=f"(?s)buffer '{key}'.*{words}"):
        encoder.execute(call)
    assert not ran
    assert encoder.statistics.as_dict() == counts
    assert all(map(torch.equal, contents(encoder), before))
    function.make = right
    check(encoder, model, call)


@pytest.mark.parametrize("case", ["columns", "flat", "dtype", "a list", "lengths", "not from 0"])
def test_wrong_layouts_are_refused_at_capture(case: str) -> None:
    key, offsets, wrong, _ = WRONG[case]
    if offsets is None:
        model = patches(tables={**TABLES, key: replace(TABLES[key], make=wrong)})
    else:
        model = patches(offsets={key: replace(offsets, make=wrong)})
    with pytest.raises(EncoderError, match=f"buffer '{key}'"):
        manager(model)


def test_a_function_of_other_sizes_alone_is_not_refused_at_capture() -> None:
    def large(grids: Sequence[Grid]) -> torch.Tensor:
        assert all(h * w >= 12 for t, h, w in grids)
        return positions(grids)

    model = patches(tables={**TABLES, "positions": PatchTable(large, (2,), torch.int64)})
    check(manager(model), model, images(*SIZES))


def test_sequences_of_a_declared_number_may_be_fewer_than_frames() -> None:
    """One sequence for each video, of all its frames."""

    def joint(grids: Sequence[Grid]) -> torch.Tensor:
        return torch.tensor([0, *lengths(grids).tolist()]).cumsum(0).to(torch.int32)

    offsets = {"cu_seqlens": PatchOffsets(joint, most=lambda tokens, items, frames: items)}
    model = patches(frames=3, offsets=offsets)
    check(manager(model), model, videos((3, 4, 2), (2, 2, 2)))
    model = patches(frames=3, offsets={"cu_seqlens": PatchOffsets(joint)})
    with pytest.raises(EncoderError, match=r"2 offsets; expected 4(.|\n)*PatchOffsets\(most"):
        manager(model).execute(videos((3, 4, 2)))


# ------------------------------------------------------------------ a protocol by hand


class Declared(Rows):
    """A table by patch and offsets, which it declares; ``wrong`` replaces their values."""

    DECLARED = MappingProxyType(
        {
            "x": EncoderBuffer("patches"),
            "t": EncoderBuffer("tokens"),
            "cu": EncoderBuffer("patches", "offsets"),
        }
    )

    def __init__(self, **more: Any) -> None:
        settings = {"buffer_keys": ["x", "t", "cu"], "padding_logics": self.DECLARED, **more}
        super().__init__(**settings)
        self.wrong: dict[str, Any] = {}

    def prepare_encoder_cudagraph_capture_inputs(self, budget: int, items: int, *rest: Any) -> Any:
        values = super().prepare_encoder_cudagraph_capture_inputs(budget, items, *rest).values
        starts = torch.tensor([0] + [budget] * (items + 1))
        values = {**values, "t": torch.zeros(budget, 1), "cu": starts}
        return EncoderCudaGraphCaptureInputs(values)

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: Any, *rest: Any) -> Any:
        starts = torch.tensor([0, *mm_kwargs["lengths"]]).cumsum(0)
        values = {"x": mm_kwargs["x"], "t": torch.ones(len(mm_kwargs["x"]), 1), "cu": starts}
        return EncoderCudaGraphReplayBuffers({**values, **self.wrong})

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        return super().encoder_cudagraph_forward(inputs) + inputs["t"]


BY_HAND: dict[str, tuple[dict[str, Any], str]] = {
    "x": ({"x": torch.ones(6, 3)}, r"buffer 'x'.*expected 7 rows, the patches of 2 items"),
    "table": ({"t": torch.ones(8, 1)}, r"buffer 't'.*expected 7 rows, the tokens"),
    "scalar": ({"t": torch.tensor(1.0)}, r"buffer 't'.*expected 7 rows"),
    "columns": ({"t": torch.ones(7, 2)}, r"buffer 't'.*\[7, 2\]"),
    "dtype": ({"t": torch.ones(7, 1, dtype=torch.complex64)}, "buffer 't'.*complex64"),
    "no tensor": ({"t": [1.0]}, "buffer 't': the value is list"),
    "lengths": ({"cu": torch.tensor([3, 4])}, "buffer 'cu'.*3 at first"),
    "end": ({"cu": torch.tensor([0, 3])}, "buffer 'cu'.*3 at last"),
    "empty": ({"cu": torch.tensor([], dtype=torch.int64)}, "buffer 'cu'.*empty"),
    "fall": ({"cu": torch.tensor([0, 8, 7])}, "buffer 'cu'.*decreasing"),
}


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("case", BY_HAND)
def test_values_of_a_model_by_hand(case: str, captured: bool) -> None:
    wrong, words = BY_HAND[case]
    model = Declared()
    encoder = manager(model, captured=captured)
    call = rows(3, 4)
    check(encoder, model, call)
    before, forwards = contents(encoder), model.calls["forward"]
    model.wrong = wrong
    with pytest.raises(EncoderError, match=words):
        encoder.execute(call)
    assert all(map(torch.equal, contents(encoder), before))
    assert model.calls["forward"] == forwards
    model.wrong = {}
    check(encoder, model, call)


@pytest.mark.parametrize("captured", [True, False])
def test_offsets_without_declared_rows_rise_from_0(captured: bool) -> None:
    model = Declared(padding_logics={"cu": EncoderBuffer(tail="offsets")})
    encoder = manager(model, captured=captured)
    model.wrong = {"cu": torch.tensor([3, 4])}
    with pytest.raises(EncoderError, match="3 at first; expected integers from 0 to the number"):
        encoder.execute(rows(3, 4))
    model.wrong = {"cu": torch.tensor([0, 5])}  # of what it counts is not known
    check(encoder, model, rows(3, 4))


def test_offsets_on_a_device_are_read_in_debug_mode_alone() -> None:
    class Unread(torch.Tensor):
        """A tensor of a device that the host must not read."""

        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda", 0)

    rules = {"cu": EncoderBuffer(tail="offsets")}
    declared = EncoderCudaGraphConfig(["image"], ["cu"], 4, rules)
    values = {"cu": torch.tensor([3, 4]).as_subclass(Unread)}
    check_values(values, declared, [EncoderItemSpec(7, 7)], "default")
    with pytest.raises(EncoderError, match="3 at first"):
        check_values(values, declared, [EncoderItemSpec(7, 7)], "default", synchronises=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": "items"},
        {"rows": 3},
        {"tail": "keep"},
        {"longest_padding": 4},
        {"tail": "offsets", "longest_padding": 0},
        {"rows_per_token": -1},
        {"on_none": "drop"},
    ],
)
def test_invalid_declarations(bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"{list(bad)[-1]} = "):
        EncoderBuffer(**bad)


class Pairs(Rows):
    """Two rows of ``x`` for a token at least; ``wide`` has room for twice as many."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        rules = {
            "wide": EncoderBuffer(rows_per_token=4),
            "x": EncoderBuffer("patches", rows_per_token=2),
            "ones": EncoderBuffer("tokens", rows_per_token=1),
        }
        return EncoderCudaGraphConfig(["image"], [*rules], H, rules)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(n, n // 4) for n in mm_kwargs["lengths"]]

    def prepare_encoder_cudagraph_capture_inputs(
        self, budget: int, items: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> EncoderCudaGraphCaptureInputs:
        rows = {"wide": 4, "x": 2, "ones": 1}
        return EncoderCudaGraphCaptureInputs(
            {key: torch.ones(budget * n, C, device=device) for key, n in rows.items()}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int
    ) -> EncoderCudaGraphReplayBuffers:
        x = mm_kwargs["x"]
        return EncoderCudaGraphReplayBuffers({"wide": x, "x": x, "ones": torch.ones_like(x[::4])})

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        tokens = len(inputs["ones"])
        return self.linear(inputs["x"][:tokens] + inputs["wide"][:tokens] + inputs["ones"])


def test_an_item_takes_the_room_that_each_buffer_needs() -> None:
    """16 rows for 4 tokens are 8 tokens of ``x``; a buffer that counts tokens is no bound."""
    model = Pairs()
    encoder = manager(model, token_budgets=[4, 8])
    check(encoder, model, rows(16))
    assert (encoder.statistics.hits, encoder.statistics.misses) == (1, 0)


@pytest.mark.parametrize("rule", [{"rows": "patches"}, {"rows_per_token": 4}])
def test_each_path_has_an_input_of_its_own(rule: Any) -> None:
    rules = {"x": EncoderBuffer(**rule)}
    with pytest.raises(ConfigError, match=r"buffer 'x' with several paths is impossible"):
        EncoderCudaGraphConfig(["image"], ["x"], 4, rules, enable_dual_path_graph=True)
    tokens = {"x": EncoderBuffer("tokens")}
    EncoderCudaGraphConfig(["image"], ["x"], 4, tokens, enable_dual_path_graph=True)


# ------------------------------------------------------------------ a capture that failed


def test_the_reason_of_a_failed_capture(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Rows):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            inputs["x"].sum().tolist()
            return super().encoder_cudagraph_forward(inputs)

    model = Reads()
    encoder = manager(model, captured=False, config=config(on_fallback="warn"))
    assert len(encoder.capture().missing) == 4
    check(encoder, model, rows(5))
    (warning,) = [each.message for each in caplog.records if "group of items" in each.message]
    assert "capture_failed: 5 tokens: " in warning
    assert "capture()" not in warning
    table = encoder.coverage()
    assert "eager: capture_failed: 1 item, 5 tokens a group\n  " in table
    encoder.clear()
    check(encoder, model, rows(5))
    assert "eager: not_captured: 1 item" in encoder.coverage()
    assert repr(encoder.statistics) == "<EncoderStatistics: 0 hits, 2 misses, 0 without tokens>"


def test_a_replaced_weight_names_the_method_of_the_manager() -> None:
    model = Rows()
    encoder = manager(model)
    model.linear.weight = torch.nn.Parameter(torch.ones_like(model.linear.weight))
    with pytest.raises(Exception, match=r"capture again: clear\(\), capture\(\)\."):
        encoder.execute(rows(3))
