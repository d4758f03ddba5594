"""Real architectures of transformers, batch sizes in changing order, each call against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.asserts import Several
from lib.entry import WARMING, assert_counts, assert_same, compiled
from lib.language_models import VOCABULARY, build
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

import cgcompile
from cgcompile.errors import TraceError
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


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_sizes_in_turn(name: str, device: str) -> None:
    """In two modes, from one trace."""
    make, inputs = MODELS[name]
    model = make(device)
    settings = {"compiler": "eager" if device == "cpu" else "inductor", "capture_device": "host"}
    modes = ("FULL_AND_PIECEWISE", "PIECEWISE")
    several = Several([cgcompile.Backend(**settings, cudagraph_mode=mode) for mode in modes])
    compiled = torch.compile(_logits(model), backend=several)
    for chosen, backend in enumerate(several.backends):
        several.chosen, previous = chosen, None
        with torch.inference_mode():
            for call, size in enumerate(SIZES * ROUNDS):
                batch = inputs(size, device)
                if call == chosen == 0:
                    torch._dynamo.mark_dynamic(batch[0], 0)
                expected, result = _logits(model)(*batch), compiled(*batch)
                torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
                same_shape = previous is not None and previous.shape == result.shape
                assert not same_shape or (previous != result).any()
                previous = result
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


# ------------------------------------------------------------------ cgcompile.compile


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    return BertModel(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("guards", ["keep", "none"])
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.usefixtures("without_gradients")
def test_keywords_in_and_result_types_out(name: str, guards: str) -> None:
    model = bert() if name == "bert" else build(name, "cpu")
    extra = {"use_cache": False} if name == "llama" else {}
    dims = {"input_ids": {0: "rows", 1: "tokens"}, "attention_mask": {0: "rows", 1: "tokens"}}
    one = compiled(model, guards=guards, dynamic_dims=dims, capture_device="host")
    for shape in ((2, 9), (3, 5), (2, 9), (4, 7), (2, 9), (2, 9)):
        ids = torch.randint(1, VOCABULARY, shape)
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        result = one(input_ids=ids, attention_mask=mask, **extra)
        expected = model(input_ids=ids, attention_mask=mask, **extra)
        assert type(result) is type(expected)
        assert_same(result.to_tuple(), expected.to_tuple())
    assert len(one.traces) == 1
    assert_counts(one.backend, 1, 2, {WARMING: 3})
    with pytest.raises(TraceError, match="'tokens'"):
        one(input_ids=ids, attention_mask=mask[:, 1:], **extra)
