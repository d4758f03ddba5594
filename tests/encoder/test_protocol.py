"""The protocol: what is mandatory, what is lent, what is refused."""

from typing import Any

import pytest
import torch
from encoder_support import DualPath, H, Rows, close, dual, images, manager, patches, rows, videos
from torch import nn

from cgcompile.encoder import (
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    supports_encoder_cudagraph,
)
from cgcompile.encoder.protocol import MANDATORY, OPTIONAL
from cgcompile.errors import ConfigError, EncoderBudgetError, EncoderItemError, EncoderModelError


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
    methods = {each: getattr(Rows, each) for each in MANDATORY if each != name}
    bases = (SupportsEncoderCudaGraph,) if inherits else ()
    model = type("Mine", bases, methods)()
    assert not supports_encoder_cudagraph(model)
    with pytest.raises(EncoderModelError, match=rf"Mine has no method {name}\(\)"):
        EncoderCudaGraphManager(model, device="cpu", dtype=torch.float32, token_budgets=[8])


def test_the_older_three_methods_are_told_of_the_one() -> None:
    older = {
        "get_encoder_cudagraph_num_items": lambda self, kw: 1,
        "get_encoder_cudagraph_per_item_output_tokens": lambda self, kw: [1],
        "get_encoder_cudagraph_per_item_input_sizes": lambda self, kw: [1],
    }
    methods = {each: getattr(Rows, each) for each in MANDATORY[:1] + MANDATORY[2:]}
    with pytest.raises(EncoderModelError, match=r"older protocol(.|\n)*EncoderItemSpec\("):
        manager(type("Mine", (), {**methods, **older})(), captured=False)


def test_defaults_are_lent() -> None:
    model = Rows()
    made = manager(model)
    call = rows(3, 5)
    found = made.execute(call)
    for mine, x in zip(found, call["x"].split([3, 5]), strict=True):
        close(mine, model.linear(x).tanh())


def test_the_default_eager_forward_of_the_protocol() -> None:
    class Mine(Rows, SupportsEncoderCudaGraph):
        encoder_eager_forward = SupportsEncoderCudaGraph.encoder_eager_forward

    model, call = Mine(), rows(4)
    expected = model.linear(call["x"]).tanh()
    close(model.encoder_eager_forward(call), expected)
    model.prepare_encoder_cudagraph_replay_buffers = lambda *_: type(
        "B", (), {"values": {"x": None}}
    )  # type: ignore[assignment]
    with pytest.raises(EncoderModelError, match="None for 'x'"):
        model.encoder_eager_forward(call)
    with pytest.raises(EncoderModelError, match="None for 'x'"):
        manager(model, captured=False).execute(call)


def test_the_default_eager_forward_tells_one_path_of_another_name() -> None:
    class Mine(DualPath):
        encoder_eager_forward = SupportsEncoderCudaGraph.encoder_eager_forward

        def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
            paths = {"global": EncoderCudaGraphPathConfig()}
            return EncoderCudaGraphConfig(["image"], ["x"], H, paths=paths)

    model, call = Mine(), dual(1)
    expected = model.towers["global"](call["global"])
    close(model.encoder_eager_forward(call, path="global"), expected)


def test_budgets_need_a_range() -> None:
    with pytest.raises(EncoderModelError, match="token_budgets="):
        manager(Rows(), token_budgets=None, captured=False)
    seen = []

    class Ranged(Rows):
        def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
            seen.append(settings)
            return 4, 100

    made = manager(Ranged(), token_budgets=None, settings="mine", captured=False)
    assert (made.token_budgets, seen) == ([4, 8, 16, 32, 64, 100], ["mine"])
    assert made.max_batch_size == 4


def test_modality() -> None:
    image, both = patches(), patches(frames=4)
    assert image.get_input_modality(videos((1, 2, 2))) == "image"  # it has no other
    assert both.get_input_modality(videos((1, 2, 2))) == "video"
    assert both.get_input_modality(images((2, 2))) == "image"
    assert both.get_input_modality({"pixel_values": 1, "pixel_values_videos": None}) == "image"
    with pytest.raises(
        EncoderModelError, match=r"several modalities.*image_grid_thw.*video_grid_thw"
    ):
        both.get_input_modality({**images((2, 2)), **videos((1, 2, 2))})
    with pytest.raises(EncoderModelError, match="no known modality: keys input_ids"):
        both.get_input_modality({"input_ids": 1})
    with pytest.raises(EncoderModelError, match="several modalities"):
        manager(both).execute({**images((2, 2)), **videos((1, 2, 2))})


class Odd(Rows):
    """Says one thing wrong."""

    def __init__(self, wrong: str, value: Any) -> None:
        super().__init__()
        self.wrong, self.value = wrong, value

    def get_encoder_cudagraph_config(self) -> Any:
        return self.value if self.wrong == "config" else super().get_encoder_cudagraph_config()

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
        found = super().get_encoder_cudagraph_item_specs(mm_kwargs)
        return self.value if self.wrong == "specs" else found

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
        found = super().prepare_encoder_cudagraph_capture_inputs(*args)
        return self.value if self.wrong == "inputs" else found

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
        ("inputs", type("V", (), {"values": {"x": 3}})(), "int for 'x'"),
        ("forward", None, r"encoder_cudagraph_forward\(\) returned NoneType"),
        ("forward", torch.zeros(7, H), r"returned \[7, 6\].*at least 64 rows"),
        ("forward", torch.zeros(()), r"returned \[\]"),
    ],
)
def test_what_is_refused_at_capture(wrong: str, value: Any, words: str) -> None:
    with pytest.raises(EncoderModelError, match=words):
        manager(Odd(wrong, value))


@pytest.mark.parametrize(
    ("wrong", "value", "error", "words"),
    [
        ("specs", [(3, 3)], EncoderModelError, "tuple; expected a list of EncoderItemSpec"),
        (
            "specs",
            [EncoderItemSpec(3, 3, path_output_tokens={"lokal": 1})],
            EncoderItemError,
            "item 0: output tokens on path 'lokal'",
        ),
        ("specs", [EncoderItemSpec(3, 3, 1)], ConfigError, "enable_dual_path_graph=True"),
        ("eager", torch.zeros(2, H), EncoderModelError, r"eager_forward\(\) returned \[2, 6\]"),
        ("post", None, EncoderModelError, "no result for item 0"),
    ],
)
def test_what_is_refused_at_a_call(wrong: str, value: Any, error: Any, words: str) -> None:
    model = Odd(wrong, value)
    made = manager(model)
    with pytest.raises(error, match=words):
        made.execute(rows(70) if wrong == "eager" else rows(3))
    model.wrong = ""
    call = rows(3)  # and the next good call works
    close(made.execute(call)[0], model.linear(call["x"]).tanh())


@pytest.mark.parametrize("bad", [[0, 8], [-8], [8, -1], []])
def test_budgets_that_cannot_be(bad: list[int]) -> None:
    with pytest.raises(EncoderBudgetError):
        manager(Rows(), token_budgets=bad, captured=False)


def test_more_items_than_the_least_budget() -> None:
    with pytest.raises(EncoderBudgetError, match="must be <= the smallest token budget, 8"):
        manager(Rows(), max_batch_size=9, captured=False)
    assert manager(Rows(), max_batch_size=8, captured=False).max_batch_size == 8
    with pytest.raises(ConfigError, match="token_budgets"):
        manager(Rows(), token_budgets={"local": [8]}, captured=False)


def test_the_configuration_is_asked_once_and_copied() -> None:
    class Mine(Rows):
        def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
            self.count("config")
            self.last = EncoderCudaGraphConfig(["image"], ["x"], H)
            return self.last

    model = Mine()
    made = manager(model)
    model.last.buffer_keys.append("y")  # type: ignore[attr-defined]
    made.execute(rows(3))
    assert model.calls["config"] == 1
    assert (made.config.buffer_keys, made.supports_modality("video")) == (["x"], False)
