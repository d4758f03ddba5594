"""The protocol: mandatory methods, defaults, and what is refused."""

from typing import Any

import pytest
import torch
from lib.encoders import (
    DualPath,
    H,
    Rows,
    close,
    config,
    dual,
    images,
    manager,
    patches,
    rows,
    videos,
)
from torch import nn

from cgcompile.encoder import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    PatchEncoder,
    SupportsEncoderCudaGraph,
    supports_encoder_cudagraph,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.protocol import MANDATORY, OPTIONAL
from cgcompile.errors import ConfigError


def test_names_of_the_protocol() -> None:
    assert sorted((*MANDATORY, *OPTIONAL)) == [
        "encoder_cudagraph_forward",
        "encoder_eager_forward",
        "get_encoder_cudagraph_budget_range",
        "get_encoder_cudagraph_config",
        "get_encoder_cudagraph_item_specs",
        "get_input_modality",
        "postprocess_encoder_output",
        "prepare_encoder_cudagraph_capture_inputs",
        "prepare_encoder_cudagraph_replay_buffers",
        "select_encoder_cudagraph_items",
    ]
    assert SupportsEncoderCudaGraph.supports_encoder_cudagraph is True


def test_six_methods_are_enough() -> None:
    model = Rows()
    assert not any(hasattr(model, name) for name in OPTIONAL)
    assert supports_encoder_cudagraph(model)
    assert not isinstance(model, SupportsEncoderCudaGraph)  # a check of types sees names alone
    assert supports_encoder_cudagraph(patches())
    assert isinstance(patches(), SupportsEncoderCudaGraph)
    assert not supports_encoder_cudagraph(nn.Linear(1, 1))


@pytest.mark.parametrize("name", MANDATORY)
@pytest.mark.parametrize("inherits", [False, True])
def test_a_missing_method_is_named(name: str, inherits: bool) -> None:
    methods = {method: getattr(Rows, method) for method in MANDATORY if method != name}
    bases = (SupportsEncoderCudaGraph,) if inherits else ()
    model = type("Mine", bases, methods)()
    assert not supports_encoder_cudagraph(model)
    with pytest.raises(EncoderError, match=rf"Mine has no method {name}\(\)"):
        EncoderCudaGraphManager(model, device="cpu", dtype=torch.float32, token_budgets=[8])


def test_an_older_protocol_is_named() -> None:
    older = {"get_encoder_cudagraph_num_items": lambda self, kw: 1}
    methods = {name: getattr(Rows, name) for name in MANDATORY[:1] + MANDATORY[2:]}
    with pytest.raises(EncoderError, match=r"older protocol(.|\n)*EncoderItemSpec\("):
        manager(type("Mine", (), {**methods, **older})(), captured=False)


def test_the_default_eager_forward_of_the_protocol() -> None:
    class Mine(Rows, SupportsEncoderCudaGraph):
        encoder_eager_forward = SupportsEncoderCudaGraph.encoder_eager_forward

    model, call = Mine(), rows(4)
    expected = model.linear(call["x"]).tanh()
    close(model.encoder_eager_forward(call), expected)
    model.prepare_encoder_cudagraph_replay_buffers = lambda *_: type(
        "B", (), {"values": {"x": None}}
    )  # type: ignore[assignment]
    with pytest.raises(EncoderError, match="None for 'x'"):
        model.encoder_eager_forward(call)
    with pytest.raises(EncoderError, match="None for 'x'"):
        manager(model, captured=False).execute(call)


def test_the_default_eager_forward_passes_one_path_of_another_name() -> None:
    class Mine(DualPath):
        encoder_eager_forward = SupportsEncoderCudaGraph.encoder_eager_forward

        def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
            paths = {"global": EncoderCudaGraphPathConfig()}
            return EncoderCudaGraphConfig(["image"], ["x"], H, paths=paths)

    model, call = Mine(), dual(1)
    expected = model.towers["global"](call["global"])
    close(model.encoder_eager_forward(call, path="global"), expected)


def test_budgets_need_a_range() -> None:
    with pytest.raises(EncoderError, match="token_budgets="):
        manager(Rows(), token_budgets=None, captured=False)
    seen = []

    class Ranged(Rows):
        def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
            seen.append(settings)
            return 4, 100

    encoder = manager(Ranged(), token_budgets=None, settings="mine", captured=False)
    assert (encoder.token_budgets, seen) == ([4, 8, 16, 32, 64, 100], ["mine"])
    assert encoder.max_batch_size == 4


def test_modality() -> None:
    image, both = patches(), patches(frames=4)
    assert image.get_input_modality(videos((1, 2, 2))) == "image"  # it has no other
    assert both.get_input_modality(videos((1, 2, 2))) == "video"
    assert both.get_input_modality(images((2, 2))) == "image"
    assert both.get_input_modality({"pixel_values": 1, "pixel_values_videos": None}) == "image"
    with pytest.raises(EncoderError, match=r"several modalities.*image_grid_thw.*video_grid_thw"):
        both.get_input_modality({**images((2, 2)), **videos((1, 2, 2))})
    with pytest.raises(EncoderError, match="no known modality: keys input_ids"):
        both.get_input_modality({"input_ids": 1})
    with pytest.raises(EncoderError, match="several modalities"):
        manager(both).execute({**images((2, 2)), **videos((1, 2, 2))})


class Odd(Rows):
    """Returns one wrong value."""

    def __init__(self, wrong: str, value: Any) -> None:
        super().__init__()
        self.wrong, self.value = wrong, value

    def get_encoder_cudagraph_config(self) -> Any:
        return self.value if self.wrong == "config" else super().get_encoder_cudagraph_config()

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
        results = super().get_encoder_cudagraph_item_specs(mm_kwargs)
        return self.value if self.wrong == "specs" else results

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
        results = super().prepare_encoder_cudagraph_capture_inputs(*args)
        return self.value if self.wrong == "inputs" else results

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        if self.wrong == "forward":
            return self.value
        return super().encoder_cudagraph_forward(inputs)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any]) -> Any:
        if self.wrong == "eager":
            return self.value
        return self.linear(mm_kwargs["x"])

    def postprocess_encoder_output(self, *args: Any, **kwargs: Any) -> None:
        if self.wrong != "post":
            SupportsEncoderCudaGraph.postprocess_encoder_output(self, *args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "value", "words"),
    [
        ("config", {}, r"get_encoder_cudagraph_config\(\) returned dict"),
        ("inputs", None, r"capture_inputs\(\) returned NoneType"),
        ("inputs", EncoderCudaGraphCaptureInputs({"x": 3}), "int for 'x'"),
        ("inputs", EncoderCudaGraphCaptureInputs({}), "no value for buffer 'x'"),
        ("inputs", EncoderCudaGraphCaptureInputs({"x": 3, "z": 3}), "'z' is not among buffer_keys"),
        ("forward", None, r"encoder_cudagraph_forward\(\) returned NoneType"),
        ("forward", torch.zeros(7, H), r"returned \[7, 6\].*at least 64 rows"),
        ("forward", torch.zeros(()), r"returned \[\]"),
    ],
)
def test_what_is_refused_at_capture(wrong: str, value: Any, words: str) -> None:
    with pytest.raises(EncoderError, match=words):
        manager(Odd(wrong, value))


@pytest.mark.parametrize(
    ("wrong", "value", "error", "words"),
    [
        ("specs", [(3, 3)], EncoderError, "tuple; expected a list of EncoderItemSpec"),
        (
            "specs",
            [EncoderItemSpec(3, 3, path_output_tokens={"lokal": 1})],
            EncoderError,
            "item 0: output tokens on path 'lokal'",
        ),
        (
            "specs",
            [EncoderItemSpec(3, 3, path_output_tokens={"default": 0})],
            EncoderError,
            "item 0: 3 output tokens, but 0 on each path",
        ),
        ("specs", [EncoderItemSpec(3, 3, 1)], ConfigError, "enable_dual_path_graph=True"),
        ("eager", torch.zeros(2, H), EncoderError, r"eager_forward\(\) returned \[2, 6\]"),
        ("post", None, EncoderError, "no result for item 0"),
    ],
)
def test_what_is_refused_at_a_call(wrong: str, value: Any, error: Any, words: str) -> None:
    model = Odd(wrong, value)
    encoder = manager(model, config=config(checks="-state"))  # the model changes below
    with pytest.raises(error, match=words):
        encoder.execute(rows(70) if wrong == "eager" else rows(3))
    model.wrong = ""
    call = rows(3)  # and the next good call works
    close(encoder.execute(call)[0], model.linear(call["x"]).tanh())


@pytest.mark.parametrize("bad", [[0, 8], [-8], [8, -1], []])
def test_budgets_that_cannot_be(bad: list[int]) -> None:
    with pytest.raises(EncoderError):
        manager(Rows(), token_budgets=bad, captured=False)


def test_more_items_than_the_least_budget() -> None:
    with pytest.raises(EncoderError, match="must be <= the smallest token budget, 8"):
        manager(Rows(), max_batch_size=9, captured=False)
    assert manager(Rows(), max_batch_size=8, captured=False).max_batch_size == 8
    with pytest.raises(ConfigError, match="token_budgets"):
        manager(Rows(), token_budgets={"local": [8]}, captured=False)


def test_the_configuration_is_read_once_and_copied() -> None:
    class Mine(Rows):
        def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
            self.count("config")
            self.last = EncoderCudaGraphConfig(["image"], ["x"], H)
            return self.last

    model = Mine()
    encoder = manager(model)
    model.last.buffer_keys.append("y")  # type: ignore[attr-defined]
    encoder.execute(rows(3))
    assert model.calls["config"] == 1
    assert encoder.config.buffer_keys == ["x"]
    assert [encoder.supports_modality(name) for name in ("image", "video")] == [True, False]


# ------------------------------------------------------------------ columns, keywords, buffers


class Wide(Rows):
    """Says that its results have 999 columns."""

    def __init__(self, **more: Any) -> None:
        super().__init__(out_hidden_size=999, **more)


def test_columns_that_the_configuration_does_not_have_are_refused(device: str) -> None:
    encoder = manager(Wide(), device, token_budgets=[8, 16], captured=False)
    words = rf"returned tensors of {H} columns; out_hidden_size of EncoderCudaGraphConfig is 999"
    with pytest.raises(EncoderError, match=rf"encoder_cudagraph_forward\(\) {words}"):
        encoder.capture()
    assert encoder.budget_graphs == []
    with pytest.raises(EncoderError, match=rf"encoder_eager_forward\(\) {words}"):
        encoder.execute(rows(3, device=device))


def test_one_of_several_tensors_has_the_columns() -> None:
    call = images((2, 2), (4, 4))
    for columns in (H, 2 * H):
        model = patches(deep=True, out_hidden_size=columns)
        (first, _) = manager(model).execute(call)
        assert (first["tokens"].shape[-1], first["deep"][0].shape[-1]) == (H, 2 * H)
    with pytest.raises(EncoderError, match=rf"of {H}, {2 * H} columns; .* is 4"):
        manager(patches(deep=True, out_hidden_size=4))


def test_columns_are_those_of_items_where_the_model_puts_them_together() -> None:
    class Twice(Rows):
        def postprocess_encoder_output(
            self, output: Any, indices: Any, counts: Any, dest: Any, **_: Any
        ) -> None:
            for index, part in zip(indices, output.split(counts), strict=True):
                dest[index] = torch.cat([part, part], 1)

    encoder = manager(Twice(out_hidden_size=2 * H), token_budgets=[8, 16])
    assert encoder.execute(rows(3))[0].shape == (3, 2 * H)
    assert encoder.statistics.hits == 1
    encoder = manager(Twice(), token_budgets=[8, 16])
    with pytest.raises(EncoderError, match=rf"postprocess.* of {2 * H} columns; .* is {H}"):
        encoder.execute(rows(3))


@pytest.mark.parametrize("name", [*MANDATORY[3:], "encoder_eager_forward"])
def test_several_paths_and_axes_need_keyword_arguments(name: str) -> None:
    def without(self: Any, *values: Any) -> Any:
        return getattr(DualPath, name)(self, *values)

    model = type("OnePath", (DualPath,), {name: without})()
    words = rf"OnePath.{name}\(\) takes no path=, and the configuration has paths global, local"
    with pytest.raises(EncoderError, match=words):
        manager(model, captured=False)

    def anything(self: Any, *values: Any, **named: Any) -> Any:
        return getattr(DualPath, name)(self, *values, **named)

    encoder = manager(type("AnyPath", (DualPath,), {name: anything})(), token_budgets=[4, 16])
    assert len(encoder.execute(dual(1, 2))) == 2
    paths = {"default": EncoderCudaGraphPathConfig(axes={"longest": (4,)})}
    with pytest.raises(EncoderError, match=r"takes no axes=, and the .* axes longest"):
        manager(Rows(paths=paths), captured=False)


@pytest.mark.parametrize("captured", [True, False])
def test_a_buffer_that_is_not_declared_is_named(captured: bool) -> None:
    def forward(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return buffers["pixel_values"][::4] * buffers["pixel_value"]

    encoder = PatchEncoder(forward, merge_size=2, in_features=3, out_hidden_size=3, offsets={})
    encoder = manager(encoder, captured=False)
    words = "KeyError: 'pixel_value'; its buffers are pixel_values. Did you mean 'pixel_values'"
    with pytest.raises(EncoderError, match=words) as raised:
        encoder.capture() if captured else encoder.execute(images((2, 2)))
    assert isinstance(raised.value.__cause__, KeyError)


def test_other_key_errors_stay_what_they_are() -> None:
    class Mine(Rows):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            return {inputs.pop("x"): 1}["x"]

    with pytest.raises(KeyError, match="'x'"):
        manager(Mine(), token_budgets=[8])


def test_a_misspelt_input_is_told_its_name() -> None:
    call = images((2, 2))
    call["pixel_value"] = call.pop("pixel_values")
    with pytest.raises(EncoderError, match="Rename 'pixel_value' to 'pixel_values'"):
        manager(patches()).execute(call)


def test_items_that_were_changed_are_checked() -> None:
    class Mine(Rows):
        def get_encoder_cudagraph_item_specs(self, mm_kwargs: Any) -> Any:
            results = super().get_encoder_cudagraph_item_specs(mm_kwargs)
            results[0].output_tokens = -1
            return results

    with pytest.raises(EncoderError, match="output_tokens = -1"):
        manager(Mine(), token_budgets=[8]).execute(rows(3))
