"""``generate`` of transformers, with its own compilation of the decode step through cgcompile."""

from typing import Any

import pytest
import torch
from lib.language_models import MODELS, NEW_TOKENS, build, compile_config, generate, prompt

from cgcompile.backend import backend
from cgcompile.reasons import Counters, Reason

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def exact_matrix_products() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def recorded_on_the_host(monkeypatch: pytest.MonkeyPatch, exact_matrix_products: None) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    backend.reset()


def counters(mode: str | None = None, compiler: str = "eager") -> Counters:
    """Return the counters of the backend "cgcompile" with these settings."""
    return backend.handle(mode, None if mode else {"compiler": compiler}).counters


def compiled_and_plain(
    name: str, device: str, inputs: dict[str, torch.Tensor], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    model = build(name, device)
    expected = generate(model, inputs, disable_compile=True)
    tokens = generate(
        model, inputs, cache_implementation="static", compile_config=compile_config(**settings)
    )
    assert len(set(expected[:, -NEW_TOKENS:].flatten().tolist())) > 8  # no stuck model
    return tokens, expected


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_static_cache_gives_the_same_tokens(name: str, padded: int, device: str) -> None:
    compiler = "eager" if device == "cpu" else "inductor"
    inputs = prompt(device, padded)
    tokens, expected = compiled_and_plain(
        name, device, inputs, mode=None, options={"compiler": compiler}
    )
    assert torch.equal(tokens, expected)
    total = counters(compiler=compiler)
    # generate() makes the first token by a plain prefill; the second warms, the third captures.
    assert total.replays >= NEW_TOKENS - 4, total
    assert total.captures == 1, total
    assert set(total.plain) == {Reason.WARMING}, total


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_transformers_default_mode(device: str) -> None:
    """Its ``CompileConfig`` has mode "reduce-overhead" by default."""
    tokens, expected = compiled_and_plain("llama", device, prompt(device))
    assert torch.equal(tokens, expected)
    assert counters("reduce-overhead").replays >= NEW_TOKENS - 4


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_each_generate_has_a_cache_of_its_own(device: str) -> None:
    """A new cache is another weight set; graphs of a freed cache are dropped."""
    model = build("llama", device)
    config = compile_config(mode=None, options={"compiler": "eager"})
    for _ in range(3):
        inputs = prompt(device)
        expected = generate(model, inputs, disable_compile=True)
        model._cache = None  # else transformers keeps and clears it
        tokens = generate(model, inputs, cache_implementation="static", compile_config=config)
        assert torch.equal(tokens, expected)
    total = counters()
    assert total.captures == 3, total
    assert total.replays >= 3 * (NEW_TOKENS - 4), total


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_cache_names_the_static_one(device: str) -> None:
    model = build("llama", device)
    inputs = prompt(device)
    expected = generate(model, inputs)
    model.forward = torch.compile(model.forward, backend="cgcompile", options={"compiler": "eager"})
    assert torch.equal(generate(model, inputs), expected)
    total = counters()
    assert total.captures == total.replays == 0, total
    assert total.plain[Reason.GROWING_STATE] >= NEW_TOKENS - 5, total
    assert "StaticCache" in total.details[Reason.GROWING_STATE]
