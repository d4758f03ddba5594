"""Several sets of graphs, and a second captured size."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lib.encoders import DualPath, H, Merges, Rows, close, counts, dual, manager, rows

from cgcompile.encoder import (
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphKey,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.reasons import Reason


def check_dual(encoder: EncoderCudaGraphManager, model: DualPath, call: dict[str, Any]) -> None:
    whole = call["global"].split(model.GLOBAL)
    local = call["local"].split([count * model.LOCAL for count in call["counts"]])
    towers = model.towers
    expected = [
        torch.cat([towers["global"](one), towers["local"](two)])
        for one, two in zip(whole, local, strict=True)
    ]
    close(encoder.execute(call), expected)


def test_budgets_of_each_path() -> None:
    encoder = manager(DualPath(), token_budgets=None)
    assert encoder.token_budgets == {"global": [4, 8, 16], "local": [3, 6, 12, 16]}
    assert encoder.max_batch_size == 3  # the least budget of all
    keys = [GraphKey("global", n) for n in (16, 8, 4)] + [
        GraphKey("local", n) for n in (16, 12, 6, 3)
    ]
    assert sorted(encoder.budget_graphs) == sorted(keys)
    encoder_manager = manager(
        DualPath(), token_budgets={"local": [8], "global": [4, 8]}, captured=False
    )
    assert encoder_manager.token_budgets == {"global": [4, 8], "local": [8]}
    assert manager(DualPath(), token_budgets=[8], captured=False).token_budgets == {
        "global": [8],
        "local": [8],
    }


@pytest.mark.parametrize(("field", "path"), [("GLOBAL", "global"), ("LOCAL", "local")])
def test_a_path_that_begins_above_the_range_is_named(field: str, path: str) -> None:
    large = type("Large", (DualPath,), {field: 17})  # the range is 4 to 16
    with pytest.raises(EncoderError, match=f"path '{path}': its budgets begin at 17.* 16"):
        manager(large(), token_budgets=None, captured=False)
    budgets = {"global": [32], "local": [32]}  # given ones may be outside
    assert manager(large(), token_budgets=budgets, captured=False).token_budgets == budgets
    largest = type("Largest", (DualPath,), {field: 16})
    assert manager(largest(), token_budgets=None, captured=False).token_budgets[path] == [16]


def test_both_paths_replay(device: str) -> None:
    model = DualPath(device)
    encoder = manager(model, device, token_budgets=None)
    check_dual(encoder, model, dual(2, 1, 3, device=device))
    assert (encoder.statistics.hits, encoder.statistics.misses, model.ran) == (3, 0, [])
    results = encoder.get_cumulative_stats()
    assert (results["hits"], results["num_budgets"]) == (3, 7)  # once per item, not per path
    assert sum(encoder.statistics.tokens("global")) > 0
    assert encoder.statistics.tokens("local")[0] == 6 * model.LOCAL


def test_calibration_of_a_path_without_graphs() -> None:
    class HalfRefused(DualPath):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **more: Any) -> Any:
            if more["path"] == "local":
                inputs["x"].sum().item()
            return super().encoder_cudagraph_forward(inputs, **more)

    model = HalfRefused()
    encoder = manager(model, token_budgets=None, costs="measured", captured=False)
    assert len(encoder.capture().missing) == 4
    check_dual(encoder, model, dual(2, 0))


def test_a_path_that_the_limit_of_bytes_excludes_has_no_graphs() -> None:
    """The largest graph of a path comes first."""
    small = manager(DualPath(), token_budgets={"global": [4, 8], "local": [3]})
    model = DualPath()
    budgets = {"global": [4, 8], "local": [3, 64]}
    encoder = manager(model, token_budgets=budgets, captured=False)
    assert small.pool is not None
    encoder.capture(max_graph_bytes=small.pool.nbytes)
    assert encoder.budget_graphs == [GraphKey("global", 8), GraphKey("global", 4)]
    check_dual(encoder, model, dual(1, 0))
    assert model.ran == [("eager", "local")]
    assert encoder.statistics.reasons() == {Reason.NOT_CAPTURED: 1}


def test_an_item_without_local_patches_skips_that_graph(device: str) -> None:
    model = DualPath(device)
    encoder = manager(model, device, token_budgets=None)
    check_dual(encoder, model, dual(0, device=device))
    assert encoder.statistics.tokens("local") == (0, 0)
    check_dual(encoder, model, dual(0, 2, 0, 1, device=device))
    assert counts(encoder) == (5, 0)
    assert encoder.execute(dual(device=device)) == []


def test_one_path_replays_while_the_other_runs_eager(device: str) -> None:
    model = DualPath(device)
    encoder = manager(model, device, token_budgets=None)
    check_dual(encoder, model, dual(9, device=device))  # 27 local tokens
    assert model.ran == [("eager", "local")]
    assert encoder.statistics.replays == 1
    assert counts(encoder) == (0, 1)
    assert encoder.statistics.reasons() == {Reason.OVERSIZE: 1}
    check_dual(encoder, model, dual(1, 9, 0, 2, device=device))
    assert counts(encoder) == (3, 2)


def test_a_model_may_join_the_paths(device: str) -> None:
    model = Merges(device)
    encoder = manager(model, device, token_budgets=None)
    call = dual(2, 0, 9, 1, device=device)
    local = call["local"].split([count * 3 for count in call["counts"]])
    for mine, one, two in zip(encoder.execute(call), call["global"].split(4), local, strict=True):
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
    encoder = manager(model, token_budgets=None)
    assert encoder.token_budgets == {"global": [4, 8, 16], "local": [4, 8, 16]}
    check_dual(encoder, model, dual(2, 0, 9, 1))
    assert counts(encoder) == (3, 1)


# ------------------------------------------------------------------ axes


class Axes(Rows):
    """The largest factor of an item is a number that graphs hold, as kernels take a longest row."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        paths = {"default": EncoderCudaGraphPathConfig(axes={"factor": (1, 4, 2)})}
        return EncoderCudaGraphConfig(["image"], ["x"], H, paths=paths)

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
    encoder = manager(model, device, token_budgets=[8, 16])
    assert len(encoder.budget_graphs) == 6
    assert encoder.budget_graphs[0] == GraphKey("default", 16, (4,))
    assert {name: n for name, n in model.calls.items() if "capture" in name} == {
        f"capture {budget} {factor}": 1 for budget in (8, 16) for factor in (1, 2, 4)
    }
    for factors, taken in (((1,), 1), ((2,), 2), ((3,), 4), ((1, 2), 2), ((4, 1), 4)):
        call = rows(*[3] * len(factors), device=device, frames=list(factors))
        for mine, x in zip(encoder.execute(call), call["x"].split(3), strict=True):
            close(mine, model.linear(x) * taken)
    assert encoder.statistics.misses == 0
    call = rows(3, device=device, frames=[5])  # more than any graph has
    close(encoder.execute(call)[0], model.linear(call["x"]) * 5)
    assert encoder.statistics.reasons() == {Reason.UNLISTED_VARIANT: 1}
    said = {**rows(3, 4, device=device, frames=[1, 1]), "axes": [{"factor": 1}, {}]}
    with pytest.raises(EncoderError, match="item 1: no value for capture axis 'factor'"):
        encoder.execute(said)


def test_an_item_of_no_axis_leaves_the_others_their_graphs() -> None:
    model = Axes()
    encoder = manager(model, token_budgets=[16], max_batch_size=4)
    call = rows(3, 2, 4, frames=[1, 9, 2])
    parts = call["x"].split([3, 2, 4])
    for mine, x, factor in zip(encoder.execute(call), parts, (2, 9, 2), strict=True):
        close(mine, model.linear(x) * factor)
    assert counts(encoder) == (2, 1)
    assert encoder.statistics.reasons() == {Reason.UNLISTED_VARIANT: 1}
