"""Decode steps of unmodified models of transformers: all their attention becomes the op."""

from typing import Any

import pytest
import torch

import cgcompile

pytestmark = [pytest.mark.slow]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
COMMON = {**SIZES, **HEADS, "max_position_embeddings": 64, "pad_token_id": 0}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
FALCON = {**SIZES, "num_attention_heads": 4, "multi_query": False, "alibi": False}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 16}

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {},
    "Olmo2": {},
    "StableLm": {},
    "Mixtral": EXPERTS,
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": WINDOW,
    "Gemma3": WINDOW,
    "Cohere2": WINDOW,
    "Gemma": {"num_key_value_heads": 1},
    "GPT2": GPT,
    "GPTNeoX": {},
    "Falcon": FALCON,
    "DeepseekV3": {"num_key_value_heads": 4, "head_dim": 8, **LATENT},
    "Gemma2": WINDOW,
    "GptOss": {**EXPERTS, **WINDOW},
}
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "GPT2": (None, "GPT2LMHeadModel")}
EXPERTS_ARE_EAGER = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss")


def language_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config, model = CLASSES.get(name, (None, f"{name}ForCausalLM"))
    own = MODELS[name]
    settings = own if own in (GPT, FALCON) else {**COMMON, **own}
    config = getattr(transformers, config or f"{name}Config")(**settings)
    torch.manual_seed(0)
    return getattr(transformers, model)(config).eval().requires_grad_(False)


def decoded(
    model: Any, call: Any, padded: bool, rows: int = 2, length: int = 32
) -> list[torch.Tensor]:
    """Return the logits of five decode steps after a prompt, with a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    torch.manual_seed(1)
    tokens = torch.randint(1, 100, (rows, 10))
    mask = torch.ones(
        rows, length, dtype=torch.int64
    )  # of the whole cache, so that its shape stays
    mask[0, :3] = 0
    more = {"attention_mask": mask} if padded else {}
    logits = []
    for first, last in ((0, 5), *((n, n + 1) for n in range(5, 10))):
        step = model if first == 0 else call
        result = step(tokens[:, first:last], past_key_values=cache, use_cache=True, **more)
        logits.append(result.logits.clone())
    return logits


def backend_of() -> cgcompile.Backend:
    torch._dynamo.reset()
    return cgcompile.Backend(kernels="decode_attention", compiler="eager", capture_device="host")


def check(backend: cgcompile.Backend, result: list, expected: list, layers: int = 2) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    assert backend.counters.captures > 0
    assert backend.counters.replays > 0
    for graph in backend.graphs:
        text = "\n".join(str(piece.module.graph) for piece in graph.split.pieces)
        assert text.count("cgcompile.decode_attention") == layers
        assert "scaled_dot_product" not in text
        assert not graph.split.fusions.unfused


@pytest.mark.parametrize(
    ("name", "padded"), [*((name, False) for name in MODELS), ("Llama", True), ("Gemma2", True)]
)
def test_a_decoder(name: str, padded: bool) -> None:
    model = language_model(name)
    with torch.inference_mode():
        expected = decoded(model, model, padded)
        backend = backend_of()
        result = decoded(model, torch.compile(model.forward, backend=backend), padded)
    check(backend, result, expected)
    if name not in EXPERTS_ARE_EAGER:
        pieces = [piece for graph in backend.graphs for piece in graph.split.pieces]
        assert all(piece.capture for piece in pieces)


@pytest.mark.parametrize("name", ["Whisper", "T5"])
def test_an_encoder_decoder(name: str) -> None:
    """Self attention over a static cache, cross attention over a fixed length."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "T5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, vocab_size=100, dropout_rate=0.0)
        )
        source = torch.randint(1, 100, (2, 9))
    else:
        sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 100}
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8}
        sizes |= {"max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        model = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**sizes, encoder_ffn_dim=96, decoder_ffn_dim=96)
        )
        source = torch.randn(2, 8, 40)
    model = model.eval().requires_grad_(False)
    tokens = torch.randint(3, 100, (2, 8))

    def steps(call: Any) -> list[torch.Tensor]:
        encoded = model.get_encoder()(source)
        cache = transformers.EncoderDecoderCache(
            transformers.StaticCache(
                config=model.config.get_text_config(decoder=True), max_cache_len=32
            ),
            transformers.StaticCache(
                config=model.config.get_text_config(decoder=True),
                max_cache_len=encoded.last_hidden_state.shape[1],
            ),
        )
        logits = []
        for position in range(8):
            logits.append(
                (model if position < 2 else call)(
                    decoder_input_ids=tokens[:, position : position + 1],
                    encoder_outputs=encoded,
                    past_key_values=cache,
                    use_cache=True,
                ).logits.clone()
            )
        return logits

    with torch.inference_mode():
        expected = steps(model)
        backend = backend_of()
        result = steps(torch.compile(model.forward, backend=backend))
    check(backend, result, expected, layers=4)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_one_request(name: str) -> None:
    model = language_model(name)
    with torch.inference_mode():
        expected = decoded(model, model, padded=False, rows=1)
        backend = backend_of()
        call = torch.compile(model.forward, backend=backend)
        result = decoded(model, call, padded=False, rows=1)
    check(backend, result, expected)


@pytest.mark.parametrize(("name", "rows"), [("Qwen3", 1), ("Qwen3", 3), ("Gemma2", 3)])
def test_sizes_may_be_symbols(name: str, rows: int) -> None:
    """``dynamic=True``, and sizes that torch makes dynamic as they vary, have the op in all layers."""
    model = language_model(name)
    with torch.inference_mode():
        expected = decoded(model, model, padded=False, rows=rows)
        backend = backend_of()
        call = torch.compile(model.forward, backend=backend, dynamic=True)
        result = decoded(model, call, padded=False, rows=rows)
        check(backend, result, expected)
        backend = backend_of()
        call = torch.compile(model.forward, backend=backend)
        for number in (2, 4, rows):
            length = 16 + 8 * number
            expected = decoded(model, model, padded=False, rows=number, length=length)
            result = decoded(model, call, padded=False, rows=number, length=length)
            check(backend, result, expected)
    assert any(list(graph.split.symbols) for graph in backend.graphs)


def test_equal_layers_are_compiled_once(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, "Llama", {"num_hidden_layers": 5})
    model = language_model("Llama")
    with torch.inference_mode():
        backend = backend_of()
        decoded(model, torch.compile(model.forward, backend=backend), padded=False)
    (graph,) = backend.graphs
    assert (len(graph.split.pieces), len(graph.split.distinct)) == (6, 3)
