"""Several sets of graphs, and a second captured size."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lib.encoders import DualPath, H, Merges, Rows, close, dual, manager, rows

from cgcompile.encoder import (
    EncoderCaptureAxis,
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphKey,
)
from cgcompile.errors import EncoderError
from cgcompile.reasons import Reason


def check_dual(made: EncoderCudaGraphManager, model: DualPath, call: dict[str, Any]) -> list[Any]:
    found = made.execute(call)
    whole = call["global"].split(model.GLOBAL)
    local = call["local"].split([count * model.LOCAL for count in call["counts"]])
    for mine, one, two in zip(found, whole, local, strict=True):
        expected = torch.cat([model.towers["global"](one), model.towers["local"](two)])
        close(mine, expected)
    return found


def test_budgets_of_each_path() -> None:
    made = manager(DualPath(), token_budgets=None)
    assert made.token_budgets == {"global": [4, 8, 16], "local": [3, 6, 12, 16]}
    assert made.max_batch_size == 3  # the least budget of all
    keys = [GraphKey("global", n) for n in (16, 8, 4)] + [
        GraphKey("local", n) for n in (16, 12, 6, 3)
    ]
    assert sorted(made.budget_graphs) == sorted(keys)
    given = manager(DualPath(), token_budgets={"local": [8], "global": [4, 8]}, captured=False)
    assert given.token_budgets == {"global": [4, 8], "local": [8]}
    assert manager(DualPath(), token_budgets=[8], captured=False).token_budgets == {
        "global": [8],
        "local": [8],
    }


@pytest.mark.parametrize(("field", "path"), [("GLOBAL", "global"), ("LOCAL", "local")])
def test_a_path_that_begins_above_the_range_is_named(field: str, path: str) -> None:
    class Large(DualPath):
        pass

    setattr(Large, field, 17)  # the range is 4 to 16
    with pytest.raises(EncoderError, match=f"path '{path}': its budgets begin at 17.* 16"):
        manager(Large(), token_budgets=None, captured=False)
    made = manager(Large(), token_budgets={"global": [32], "local": [32]}, captured=False)
    assert made.token_budgets == {"global": [32], "local": [32]}
    setattr(Large, field, 16)
    assert manager(Large(), token_budgets=None, captured=False).token_budgets[path] == [16]


def test_both_paths_replay(device: str) -> None:
    model = DualPath(device)
    made = manager(model, device, token_budgets=None)
    check_dual(made, model, dual(2, 1, 3, device=device))
    assert (made.statistics.hits, made.statistics.misses, model.ran) == (3, 0, [])
    found = made.get_cumulative_stats()
    assert (found["hits"], found["num_budgets"]) == (3, 7)  # once per item, not per path
    assert sum(made.statistics.tokens("global")) > 0
    assert made.statistics.tokens("local")[0] == 6 * model.LOCAL


def test_calibration_of_a_path_without_graphs() -> None:
    class HalfRefused(DualPath):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **more: Any) -> Any:
            if more["path"] == "local":
                inputs["x"].sum().item()
            return super().encoder_cudagraph_forward(inputs, **more)

    model = HalfRefused()
    made = manager(model, token_budgets=None, calibrate=True, captured=False)
    assert len(made.capture().missing) == 4
    check_dual(made, model, dual(2, 0))


def test_an_item_without_local_patches_skips_that_graph(device: str) -> None:
    model = DualPath(device)
    made = manager(model, device, token_budgets=None)
    first = check_dual(made, model, dual(0, device=device))
    kept = first[0].clone()
    assert made.statistics.tokens("local") == (0, 0)
    check_dual(made, model, dual(0, device=device))
    assert torch.equal(first[0], kept)  # not a view of what the next replay writes
    check_dual(made, model, dual(0, 2, 0, 1, device=device))
    assert (made.statistics.hits, made.statistics.misses) == (6, 0)


def test_one_path_replays_while_the_other_runs_eager(device: str) -> None:
    model = DualPath(device)
    made = manager(model, device, token_budgets=None)
    check_dual(made, model, dual(9, device=device))  # 27 local tokens
    assert model.ran == [("eager", "local")]
    assert made.statistics.replays == 1
    assert (made.statistics.hits, made.statistics.misses) == (0, 1)
    assert made.statistics.reasons() == {Reason.OVERSIZE: 1}
    check_dual(made, model, dual(1, 9, 0, 2, device=device))
    assert (made.statistics.hits, made.statistics.misses) == (3, 2)


def test_tokens_that_are_on_no_path() -> None:
    class Mine(DualPath):
        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
            return [EncoderItemSpec(7, 7)]

    with pytest.raises(EncoderError, match="item 0: 7 output tokens, and none of them on a path"):
        manager(Mine(), token_budgets=None, captured=False).execute(dual(1))


def test_nothing_of_dual_path_is_left_out() -> None:
    made = manager(DualPath(), token_budgets=None)
    assert made.execute(dual()) == []
    lines = made.coverage().splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["global", "4", "yes"],
        ["global", "8", "yes"],
        ["global", "16", "yes"],
    ]


def test_a_model_may_join_the_paths(device: str) -> None:
    model = Merges(device)
    made = manager(model, device, token_budgets=None)
    call = dual(2, 0, 9, 1, device=device)
    local = call["local"].split([count * 3 for count in call["counts"]])
    for mine, one, two in zip(made.execute(call), call["global"].split(4), local, strict=True):
        close(mine[len(two) + 1 :], model.towers["global"](one))
        close(mine[: len(two)], model.towers["local"](two))
        assert torch.equal(mine[len(two)], torch.ones(H, device=device))


class Named(DualPath):
    """The same with paths of its own names."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        paths = {"global": EncoderCudaGraphPathConfig(4), "local": EncoderCudaGraphPathConfig()}
        return EncoderCudaGraphConfig(["image"], ["x"], H, paths=paths)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [
            EncoderItemSpec(1, 1, path_output_tokens={"global": 4, "local": 3 * count})
            for count in mm_kwargs["counts"]
        ]


def test_named_paths() -> None:
    model = Named()
    made = manager(model, token_budgets=None)
    assert made.token_budgets == {"global": [4, 8, 16], "local": [4, 8, 16]}
    check_dual(made, model, dual(2, 0, 9, 1))
    assert (made.statistics.hits, made.statistics.misses) == (3, 1)


# ------------------------------------------------------------------ axes


class Axes(Rows):
    """The largest factor of an item is a number that graphs hold, as kernels take a longest row."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        axes = (EncoderCaptureAxis("factor", (1, 4, 2)),)
        return EncoderCudaGraphConfig(["image"], ["x"], H, capture_axes=axes)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        said = mm_kwargs.get("axes", [{"factor": f} for f in mm_kwargs["frames"]])
        return [
            EncoderItemSpec(n, n, axes=axes)
            for n, axes in zip(mm_kwargs["lengths"], said, strict=True)
        ]

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, axes: Any) -> Any:
        self.count(f"capture {args[0]} {axes['factor']}")
        return super().prepare_encoder_cudagraph_capture_inputs(*args)

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, axes: Any) -> Any:
        return super().prepare_encoder_cudagraph_replay_buffers(*args)

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], *, axes: Mapping[str, int]
    ) -> Any:
        return self.linear(inputs["x"]) * axes["factor"]


def test_axes(device: str) -> None:
    model = Axes()
    made = manager(model, device, token_budgets=[8, 16])
    assert len(made.budget_graphs) == 6
    assert made.budget_graphs[0] == GraphKey("default", 16, (4,))
    assert {name: n for name, n in model.calls.items() if "capture" in name} == {
        f"capture {budget} {factor}": 1 for budget in (8, 16) for factor in (1, 2, 4)
    }
    for factors, taken in (((1,), 1), ((2,), 2), ((3,), 4), ((1, 2), 2), ((4, 1), 4)):
        call = rows(*[3] * len(factors), device=device, frames=list(factors))
        for mine, x in zip(made.execute(call), call["x"].split(3), strict=True):
            close(mine, model.linear(x) * taken)
    assert made.statistics.misses == 0
    call = rows(3, device=device, frames=[5])  # more than any graph has
    close(made.execute(call)[0], model.linear(call["x"]) * 5)
    assert made.statistics.reasons() == {Reason.UNLISTED_VARIANT: 1}
    said = {**rows(3, 4, device=device, frames=[1, 1]), "axes": [{"factor": 1}, {}]}
    with pytest.raises(EncoderError, match="item 1: nothing is said for capture axis 'factor'"):
        made.execute(said)


def test_an_item_of_no_axis_leaves_the_others_their_graphs() -> None:
    model = Axes()
    made = manager(model, token_budgets=[16], max_batch_size=4)
    call = rows(3, 2, 4, frames=[1, 9, 2])
    parts = call["x"].split([3, 2, 4])
    for mine, x, factor in zip(made.execute(call), parts, (2, 9, 2), strict=True):
        close(mine, model.linear(x) * factor)
    assert (made.statistics.hits, made.statistics.misses) == (2, 1)
    assert made.statistics.reasons() == {Reason.UNLISTED_VARIANT: 1}
