"""``decode_attention`` on CUDA: decode steps of transformers replay the op, and equal eager."""

import pytest
import torch

import cgcompile
from cgcompile.kernels.decode_attention import why_unsupported

pytestmark = pytest.mark.gpu

OP = "cgcompile.decode_attention"
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _supported() -> None:
    pytest.importorskip("transformers")
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")


def language_model(family: str, **more):
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, **more, eos_token_id=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.to("cuda", torch.bfloat16).eval().requires_grad_(False)


def ops_of(backend: cgcompile.Backend) -> str:
    pieces = [piece for graph in backend.graphs for piece in graph.split.pieces]
    return "\n".join(str(piece.module.graph) for piece in pieces)


def steps(model, call, tokens) -> list[torch.Tensor]:
    """Return the logits of decode steps after a prompt, with a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=256)
    model(tokens[:, :40], past_key_values=cache, use_cache=True)
    rest = tokens[:, 40:].split(1, dim=1)
    return [call(token, past_key_values=cache, use_cache=True).logits.clone() for token in rest]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GptOss"])
def test_decode_steps_equal_eager(family, compiler, rows) -> None:
    # All experts, so that rounding chooses none.
    more = {"num_local_experts": 4, "num_experts_per_tok": 4} if family == "GptOss" else {}
    model = language_model(family, **more)
    tokens = torch.randint(1, 128, (rows, 46), device="cuda")
    backend = cgcompile.Backend(compiler=compiler)
    with torch.inference_mode():
        expected = steps(model, model, tokens)
        result = steps(model, torch.compile(model.forward, backend=backend), tokens)
    for one, other in zip(result, expected, strict=True):
        most = float(other.float().abs().max())
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.04 * most)
    assert backend.counters.replays > 0
    assert ops_of(backend).count(OP) >= 2
    assert "scaled_dot_product" not in ops_of(backend)


def test_generate_replays_the_op() -> None:
    from transformers import CompileConfig

    model = language_model("Llama")
    handle = cgcompile.Backend()

    def backend(graph, inputs):
        return handle(graph, inputs)

    tokens = torch.randint(1, 128, (2, 8), device="cuda")
    settings = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    compiled = CompileConfig(backend=backend, mode=None)
    generated = model.generate(tokens, **settings, compile_config=compiled)
    assert generated.shape == (2, 20)
    assert handle.counters.replays > 0
    assert OP in ops_of(handle)
    again = model.generate(tokens, **settings, compile_config=compiled)
    torch.testing.assert_close(again, generated)
