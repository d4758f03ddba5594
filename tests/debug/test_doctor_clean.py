"""Models that graphs hold as they are have no findings worse than notes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lib.debug import examine, worse_than_notes
from torch import nn

import cgcompile

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def llama(device: str) -> tuple[nn.Module, tuple]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL, use_cache=False)).to(device).eval()
    return model, (torch.arange(6, device=device).reshape(2, 3),)


def bert(device: str) -> tuple[nn.Module, tuple]:
    from transformers import BertConfig, BertModel

    tokens = torch.arange(6, device=device).reshape(2, 3)
    return BertModel(BertConfig(**SMALL)).to(device).eval(), (tokens, torch.ones_like(tokens))


class Decoder(nn.Module):
    """A hand-written decoder layer with rotary positions and a cache of fixed size."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.RMSNorm(16)
        self.register_buffer("cache", torch.zeros(2, 8, 16))
        self.register_buffer("angles", torch.outer(torch.arange(8.0), torch.rand(8)))

    def forward(self, x, positions):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = self.angles.index_select(0, positions)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        self.cache.index_copy_(1, positions, torch.stack([k, v]))
        keys, values = self.cache
        mask = torch.arange(8, device=x.device)[None] <= positions[:, None]
        y = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)
        return x + self.out(y[0])


def decoder(device: str) -> tuple[nn.Module, tuple]:
    positions = torch.tensor([0, 1, 2], device=device)
    return Decoder().to(device), (torch.randn(3, 16, device=device), positions)


def convolutions(device: str) -> tuple[nn.Module, tuple]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
    )
    return model.to(device).eval(), (torch.randn(2, 3, 8, 8, device=device),)


def recurrent(device: str) -> tuple[nn.Module, tuple]:
    return nn.GRU(4, 8, batch_first=True).to(device), (torch.randn(2, 5, 4, device=device),)


def transformer(device: str) -> tuple[nn.Module, tuple]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.to(device).eval(), (torch.randn(2, 5, 16, device=device),)


class Experts(nn.Module):
    """A dense mixture: every expert works on every row, and a router weighs them."""

    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(x.shape[0], 3, device=x.device).scatter(1, chosen, weights)
        return torch.einsum("te,edf,td->tf", gates, self.up, x).clamp_(-3, 3)


def experts(device: str) -> tuple[nn.Module, tuple]:
    return Experts().to(device), (torch.randn(5, 8, device=device),)


def nested(device: str) -> tuple[Callable, tuple]:
    weight = torch.randn(4, 4, device=device)

    def model(batch, *, scale=None):
        first, rest = batch["x"], batch["more"]
        return {"y": first @ weight + sum(rest), "n": first.shape[0]}

    x = torch.randn(2, 4, device=device)
    return model, ({"x": x, "more": [x, x]},)


MODELS = [llama, bert, decoder, convolutions, recurrent, transformer, experts, nested]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("settings", [{}, {"splitting": "breakable"}], ids=["fx", "breakable"])
def test_nothing_worse_than_notes(device: str, make: Callable, settings: dict) -> None:
    torch.manual_seed(0)
    model, args = make(device)
    with torch.inference_mode():
        expected = model(*args)
    diagnosis = examine(model, *args, config=cgcompile.CompilationConfig(**settings))
    assert not worse_than_notes(diagnosis), str(diagnosis)
    assert diagnosis.ok
    assert diagnosis.device.startswith(device)
    with torch.inference_mode():
        torch.testing.assert_close(model(*args), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_clean_models_are_captured(device: str) -> None:
    """Models without findings really become graphs."""
    for make in (decoder, experts):
        model, args = make(device)
        backend = cgcompile.Backend(compiler="eager", capture_device="host")
        with torch.inference_mode():
            compiled = torch.compile(model, backend=backend)
            for _ in range(3):
                compiled(*args)
        assert backend.counters.replays == 1, str(backend.counters)


def test_a_number_in_a_tensor_is_no_value_of_the_device() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0.5, torch.tensor(2.0)) + 1

    assert not worse_than_notes(examine(step, torch.rand(8)))
