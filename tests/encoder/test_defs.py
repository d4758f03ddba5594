"""The data types: names, defaults, what is refused."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from cgcompile.encoder import (
    EncoderCaptureAxis,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from cgcompile.errors import ConfigError, EncoderError


def config(**more: Any) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(
        **{"modalities": ["image"], "buffer_keys": ["x", "y"], "out_hidden_size": 4, **more}
    )


def test_item_spec() -> None:
    names = ["input_size", "output_tokens", "global_output_tokens", "local_output_tokens"]
    assert [each.name for each in fields(EncoderItemSpec)][:4] == names
    spec = EncoderItemSpec(16, 4)
    assert (spec.input_size, spec.output_tokens) == (16, 4)
    assert (spec.global_output_tokens, spec.local_output_tokens) == (0, 0)
    assert (spec.frames, spec.axes, spec.path_output_tokens) == (1, {}, {})
    assert spec == EncoderItemSpec(input_size=16, output_tokens=4)


def test_tokens_by_path() -> None:
    spec = EncoderItemSpec(1, 7, 4, 3)
    assert [spec.tokens(path) for path in ("default", "global", "local", "x")] == [7, 4, 3, 0]
    named = EncoderItemSpec(1, 7, path_output_tokens={"x": 5})
    assert [named.tokens(path) for path in ("x", "y", "default")] == [5, 0, 0]


@pytest.mark.parametrize("bad", [-1, 1.5, True, None, torch.tensor(3)])
@pytest.mark.parametrize("name", ["input_size", "output_tokens", "local_output_tokens", "frames"])
def test_item_counts_are_whole(name: str, bad: Any) -> None:
    with pytest.raises(EncoderError, match=name):
        EncoderItemSpec(**{"input_size": 1, "output_tokens": 1, name: bad})
    with pytest.raises(EncoderError, match="mine"):
        EncoderItemSpec(1, 1, path_output_tokens={"mine": bad})


def test_config_has_the_defaults_of_its_source() -> None:
    names = [
        "modalities",
        "buffer_keys",
        "out_hidden_size",
        "padding_logics",
        "max_frames_per_video",
        "enable_dual_path_graph",
        "global_token_per_image",
        "local_token_per_patch",
    ]
    assert [each.name for each in fields(EncoderCudaGraphConfig)][:8] == names
    made = EncoderCudaGraphConfig(["image"], ["x"], 4)
    assert (made.modalities, made.buffer_keys, made.out_hidden_size) == (["image"], ["x"], 4)
    assert made.padding_logics == {}
    assert made.max_frames_per_video == 1
    assert made.enable_dual_path_graph is False
    assert (made.global_token_per_image, made.local_token_per_patch) == (0, 0)


def test_config_defaults_beyond_it() -> None:
    made = config()
    assert made.paths == {}
    assert made.graph_sets == {"default": EncoderCudaGraphPathConfig(None)}
    assert (made.capture_axes, made.offset_keys, made.on_none) == ((), {}, {})
    assert made.input_rows_per_token == 0
    dual = config(
        enable_dual_path_graph=True, global_token_per_image=272, local_token_per_patch=100
    )
    assert dual.graph_sets == {
        "global": EncoderCudaGraphPathConfig(272),
        "local": EncoderCudaGraphPathConfig(100),
    }
    assert config(offset_keys=["x"]).offset_keys == {"x": None}
    assert config(offset_keys={"x": 8}).longest_padding == {"x": 8}


def test_replaced_fields_change_the_sets_of_graphs() -> None:
    plain = config()
    dual = replace(
        plain, enable_dual_path_graph=True, global_token_per_image=272, local_token_per_patch=100
    )
    assert dual.graph_sets["global"] == EncoderCudaGraphPathConfig(272)
    least = {path: each.min_token_budget for path, each in dual.graph_sets.items()}
    assert least == {"global": 272, "local": 100}
    wider = replace(dual, global_token_per_image=8)
    assert wider.graph_sets["global"] == EncoderCudaGraphPathConfig(8)
    back = replace(
        wider, enable_dual_path_graph=False, global_token_per_image=0, local_token_per_patch=0
    )
    assert list(back.graph_sets) == ["default"]
    named = replace(plain, paths={"one": EncoderCudaGraphPathConfig(3)})
    assert replace(named, out_hidden_size=5).graph_sets == {"one": EncoderCudaGraphPathConfig(3)}


def test_frames_count_where_there_are_videos_alone() -> None:
    assert config(max_frames_per_video=8).most_frames_of_an_item == 1
    assert config(max_frames_per_video=0).most_frames_of_an_item == 0
    both = config(modalities=["image", "video"], max_frames_per_video=8)
    assert both.most_frames_of_an_item == 8


def test_item_specs_can_be_changed_as_those_of_the_source() -> None:
    spec = EncoderItemSpec(16, 4)
    spec.output_tokens += 2
    assert (spec.tokens(), spec) == (6, EncoderItemSpec(16, 6))


def test_config_is_fixed() -> None:
    keys, logics = ["x"], {}  # type: ignore[var-annotated]
    made = config(buffer_keys=keys, padding_logics=logics)
    keys.append("y")
    logics["x"] = print
    assert (made.buffer_keys, made.padding_logics) == (["x"], {})
    with pytest.raises(FrozenInstanceError):
        made.out_hidden_size = 8  # type: ignore[misc]


@pytest.mark.parametrize("name", ["global_token_per_image", "local_token_per_patch"])
def test_fields_of_dual_path_need_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=5.*enable_dual_path_graph=True"):
        config(**{name: 5})
    assert getattr(config(enable_dual_path_graph=True, **{name: 5}), name) == 5


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"out_hidden_size": 0}, "out_hidden_size"),
        ({"max_frames_per_video": -1}, "max_frames_per_video"),
        ({"global_token_per_image": -1}, "global_token_per_image"),
        ({"modalities": []}, "modalities"),
        ({"modalities": "image"}, "modalities"),
        ({"buffer_keys": []}, "buffer_keys"),
        ({"buffer_keys": ["x", "x"]}, "each once"),
        ({"padding_logics": {"z": print}}, "'z'"),
        ({"offset_keys": ["z"]}, "'z'"),
        ({"offset_keys": {"x": 0}}, "offset_keys"),
        ({"offset_keys": ["x"], "padding_logics": {"x": print}}, "what the tail holds"),
        ({"on_none": {"z": "zero"}}, "'z'"),
        ({"on_none": {"x": "drop"}}, "'keep' or 'zero'"),
        ({"enable_dual_path_graph": True, "paths": {"a": EncoderCudaGraphPathConfig()}}, "global"),
        ({"enable_dual_path_graph": True, "input_rows_per_token": 4}, "input_rows_per_token"),
    ],
)
def test_config_refuses(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**said)


def test_axes_and_paths() -> None:
    assert EncoderCaptureAxis("m", (8, 2, 8)).values == (2, 8)
    for bad in ((), (-1,), (1.5,)):
        with pytest.raises(ConfigError, match="'m'"):
            EncoderCaptureAxis("m", bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_token_budget"):
        EncoderCudaGraphPathConfig(0)


def test_buffers_hold_the_values_themselves() -> None:
    values = {"x": torch.zeros(2)}
    assert EncoderCudaGraphCaptureInputs(values).values is values
    assert EncoderCudaGraphReplayBuffers(values={"x": None}).values == {"x": None}
