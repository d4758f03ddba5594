"""Real architectures of transformers, batch sizes in changing order, each call against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.asserts import Several
from lib.language_models import VOCABULARY, build
from transformers import ViTConfig, ViTForImageClassification

import cgcompile
from cgcompile.reasons import Reason

SIZES = (2, 3, 2, 1, 3)
ROUNDS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def vision_transformer(device: str) -> Any:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=10,
        initializer_range=0.2,
    )
    return ViTForImageClassification(config).eval().to(device)


def images(size: int, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(size, 3, 32, 32).to(device),)


def tokens(size: int, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randint(1, VOCABULARY, (size, 9)).to(device),)


MODELS: dict[str, tuple[Callable[[str], Any], Callable[[int, str], tuple[torch.Tensor, ...]]]] = {
    "llama": (lambda device: build("llama", device), tokens),
    "mixture_of_experts": (lambda device: build("mixtral", device), tokens),
    "vision_transformer": (vision_transformer, images),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_sizes_in_turn(name: str, device: str) -> None:
    """In two modes, from one trace."""
    make, inputs = MODELS[name]
    model = make(device)
    given = {"compiler": "eager" if device == "cpu" else "inductor", "capture_device": "host"}
    modes = ("FULL_AND_PIECEWISE", "PIECEWISE")
    several = Several([cgcompile.Backend(**given, cudagraph_mode=mode) for mode in modes])
    compiled = torch.compile(_logits(model), backend=several)
    for chosen, backend in enumerate(several.backends):
        several.chosen, previous = chosen, None
        with torch.inference_mode():
            for call, size in enumerate(SIZES * ROUNDS):
                batch = inputs(size, device)
                if call == chosen == 0:
                    torch._dynamo.mark_dynamic(batch[0], 0)
                expected, found = _logits(model)(*batch), compiled(*batch)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                same_shape = previous is not None and previous.shape == found.shape
                assert not same_shape or (previous != found).any()
                previous = found
        total = backend.counters
        sizes, graphs = len(set(SIZES)), total.calls // (len(SIZES) * ROUNDS)
        assert total.captures == sizes * graphs, total
        assert total.replays == (len(SIZES) * ROUNDS - 2 * sizes) * graphs, total
        assert set(total.plain) == {Reason.WARMING}, total


def _logits(model: Any) -> Callable[..., torch.Tensor]:
    def run(batch: torch.Tensor) -> torch.Tensor:
        extra = {} if batch.is_floating_point() else {"use_cache": False}
        logits: torch.Tensor = model(batch, **extra).logits
        return logits

    return run
