"""The data types of the protocol: names, defaults, values that are refused."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

import cgcompile
from cgcompile.encoder import (
    EncoderBuffer,
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
    return {field.name: getattr(record, field.name) for field in fields(record) if field.init}


def test_fields_and_defaults_in_the_order_of_the_source() -> None:
    spec = {"input_size": 16, "output_tokens": 4, "global_output_tokens": 0}
    spec |= {"local_output_tokens": 0, "path_output_tokens": {}, "frames": 1, "axes": {}}
    assert list(values(EncoderItemSpec(16, 4)).items()) == list(spec.items())
    source = {"modalities": ["image"], "buffer_keys": ["x"], "out_hidden_size": 4}
    source |= {"padding_logics": {}, "max_frames_per_video": 1, "enable_dual_path_graph": False}
    source |= {"global_token_per_image": 0, "local_token_per_patch": 0}
    expected = {**source, "paths": {}}
    plain = EncoderCudaGraphConfig(["image"], ["x"], 4)
    assert list(values(plain).items()) == list(expected.items())
    assert plain.buffers == {"x": EncoderBuffer(None, "zeros", None, 0, "keep")}


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
    fixed = config(buffer_keys=keys, padding_logics=logics)
    keys.append("y")
    logics["x"] = print
    assert (fixed.buffer_keys, fixed.padding_logics) == (["x"], {})
    offsets = {"x": EncoderBuffer(tail="offsets"), "y": EncoderBuffer("tokens", "offsets", 8)}
    assert config(padding_logics=offsets).longest_padding == {"x": None, "y": 8}
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
        ({"padding_logics": {"z": EncoderBuffer()}}, "'z'"),
        ({"padding_logics": {"x": 3}}, "padding_logics"),
        ({"enable_dual_path_graph": True, "paths": {"a": Path()}}, "global"),
    ],
)
def test_config_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**fields)


def test_axes_and_paths() -> None:
    assert Path(axes={"m": (8, 2, 8)}).axes == {"m": (2, 8)}
    for bad in ((), (-1,), (1.5,), 3):
        with pytest.raises(ConfigError, match="'m'"):
            Path(axes={"m": bad})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="min_token_budget"):
        Path(0)


def test_earlier_fields_work_with_a_warning() -> None:
    """Each takes its place among the rules of buffers, or the axes of paths."""
    with pytest.warns(FutureWarning, match="is deprecated: import it from"):
        axis = cgcompile.encoder.EncoderCaptureAxis("longest", (8, 4))  # type: ignore[attr-defined]
    earlier = {
        "offset_keys": {"y": 8},
        "on_none": {"x": "zero"},
        "buffer_rows": {"x": "patches", "y": "patches"},
        "input_rows_per_token": 4,
        "capture_axes": (axis,),
    }
    with pytest.warns(FutureWarning, match="is deprecated: use ") as warned:
        former = config(**earlier)
    assert {warning.filename for warning in warned} == {__file__}
    assert [next(n for n in earlier if n in str(w.message)) for w in warned] == [
        "capture_axes",
        "offset_keys",
        "on_none",
        "buffer_rows",
        "input_rows_per_token",
    ]
    assert former.buffers == {
        "x": EncoderBuffer("patches", rows_per_token=4, on_none="zero"),
        "y": EncoderBuffer("patches", "offsets", 8),
    }
    assert former.graph_sets == {"default": Path(axes={"longest": (4, 8)})}
    with pytest.warns(FutureWarning, match="offset_keys"):
        assert replace(former, offset_keys=["x"]).longest_padding == {"x": None, "y": 8}  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match="offset_keys"):
        assert replace(former, offset_keys={"y": 4}).longest_padding == {"y": 4}  # type: ignore[call-arg]
    with pytest.warns(FutureWarning):
        assert config(capture_axes=iter([axis])).graph_sets == former.graph_sets
    with pytest.warns(FutureWarning):
        counted = config(input_rows_per_token=4, buffer_rows={"x": "tokens"})
    assert counted.buffers["y"] == EncoderBuffer(rows_per_token=4)  # "x" has no rows of the input
    for wrong in ({"offset_keys": 3}, {"offset_keys": "x"}, {"on_none": {}, "padding_logics": 3}):
        with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=[*wrong][-1]):
            config(**wrong)
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="what the tail holds"):
        config(offset_keys=["x"], padding_logics={"x": print})
    with pytest.warns(FutureWarning):
        dual = config(capture_axes=(axis,), **DUAL)
    assert dual.graph_sets["local"] == Path(100, {"longest": (4, 8)})
    for name, value in {"on_none": {"x": "zero"}, "input_rows_per_token": 4}.items():
        with pytest.warns(FutureWarning, match=f"{name} is deprecated"):
            assert getattr(former, name) == value
