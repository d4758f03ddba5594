"""The data types of the protocol: names, defaults, values that are refused."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from cgcompile.encoder import (
    EncoderCaptureAxis,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.errors import ConfigError

Path = EncoderCudaGraphPathConfig
DUAL = {
    "enable_dual_path_graph": True,
    "global_token_per_image": 272,
    "local_token_per_patch": 100,
}


def config(**more: Any) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(
        **{"modalities": ["image"], "buffer_keys": ["x", "y"], "out_hidden_size": 4, **more}
    )


def values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def test_fields_and_defaults_in_the_order_of_the_source() -> None:
    spec = {"input_size": 16, "output_tokens": 4, "global_output_tokens": 0}
    spec |= {"local_output_tokens": 0, "path_output_tokens": {}, "frames": 1, "axes": {}}
    assert list(values(EncoderItemSpec(16, 4)).items()) == list(spec.items())
    source = {"modalities": ["image"], "buffer_keys": ["x"], "out_hidden_size": 4}
    source |= {"padding_logics": {}, "max_frames_per_video": 1, "enable_dual_path_graph": False}
    source |= {"global_token_per_image": 0, "local_token_per_patch": 0}
    more = {"paths": {}, "capture_axes": (), "offset_keys": {}, "input_rows_per_token": 0}
    expected = {**source, **more, "on_none": {}, "buffer_rows": {}}
    assert list(values(EncoderCudaGraphConfig(["image"], ["x"], 4)).items()) == list(
        expected.items()
    )


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


def test_sets_of_graphs_follow_the_fields() -> None:
    plain, dual = config(), config(**DUAL)
    assert plain.graph_sets == {"default": Path(None)}
    assert dual.graph_sets == {"global": Path(272), "local": Path(100)}
    assert replace(plain, **DUAL).graph_sets == dual.graph_sets
    assert replace(dual, global_token_per_image=8).graph_sets["global"] == Path(8)
    off = {"enable_dual_path_graph": False, "global_token_per_image": 0, "local_token_per_patch": 0}
    assert replace(dual, **off).graph_sets == plain.graph_sets  # type: ignore[arg-type]
    named = replace(plain, paths={"one": Path(3)})
    assert replace(named, out_hidden_size=5).graph_sets == {"one": Path(3)}


def test_frames_count_only_where_there_are_videos() -> None:
    assert config(max_frames_per_video=8).most_frames_of_an_item == 1
    assert config(max_frames_per_video=0).most_frames_of_an_item == 0
    both = config(modalities=["image", "video"], max_frames_per_video=8)
    assert both.most_frames_of_an_item == 8


def test_config_is_fixed_and_copies_its_fields() -> None:
    keys, logics = ["x"], {}  # type: ignore[var-annotated]
    fixed = config(buffer_keys=keys, padding_logics=logics, offset_keys=["x"])
    keys.append("y")
    logics["x"] = print
    assert (fixed.buffer_keys, fixed.padding_logics) == (["x"], {})
    assert fixed.offset_keys == fixed.longest_padding == {"x": None}
    assert config(offset_keys={"x": 8}).longest_padding == {"x": 8}
    with pytest.raises(FrozenInstanceError):
        fixed.out_hidden_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_token_per_image": 5}, "global_token_per_image=5.*enable_dual_path_graph=True"),
        ({"local_token_per_patch": 5}, "local_token_per_patch=5.*enable_dual_path_graph=True"),
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
        ({"enable_dual_path_graph": True, "paths": {"a": Path()}}, "global"),
        ({"enable_dual_path_graph": True, "input_rows_per_token": 4}, "input_rows_per_token"),
    ],
)
def test_config_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**fields)


def test_axes_and_paths() -> None:
    assert EncoderCaptureAxis("m", (8, 2, 8)).values == (2, 8)
    for bad in ((), (-1,), (1.5,)):
        with pytest.raises(ConfigError, match="'m'"):
            EncoderCaptureAxis("m", bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_token_budget"):
        Path(0)
