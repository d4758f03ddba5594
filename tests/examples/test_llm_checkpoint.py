"""Checkpoints of Hugging Face give the logits and tokens of transformers, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.examples import serve, with_caches
from llm_engine.checkpoint import CheckpointError, load_llama
from llm_engine.drafts import NgramDraft
from llm_engine.judge import plain_logits
from llm_engine.scheduler import Request

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "no groups": {"num_key_value_heads": 4},
    "own head dim": {"head_dim": 16},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
}


def reference(**more: Any) -> Any:
    """transformers' own model, with weights wide enough that tokens vary."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        **more,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def assert_same_logits(folder: Path, model: Any, tokens: list[int]) -> None:
    """Compare the logits of a whole prompt."""
    loaded = with_caches(load_llama(folder), "cpu")
    loaded.forget()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    logits = plain_logits(loaded, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(logits[0], logits[1])


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", ["one", "several"])
def test_logits_are_those_of_transformers(variant: str, shards: str, tmp_path: Path) -> None:
    model = reference(**VARIANTS[variant])
    model.save_pretrained(tmp_path, max_shard_size={"one": "1GB", "several": "10KB"}[shards])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "several")
    assert_same_logits(tmp_path, model, torch.randint(60, (37,)).tolist())


def test_old_spellings_of_a_configuration(tmp_path: Path) -> None:
    """As transformers wrote it before version 5: theta outside, "type" for "rope_type"."""
    model = reference(rope_parameters={**LLAMA3, "rope_theta": 500.0})
    model.save_pretrained(tmp_path)
    old = {k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")}
    change(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling={**old, "type": "llama3"})
    assert_same_logits(tmp_path, model, list(range(1, 30)))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 3])
def test_served_tokens_are_those_of_transformers(drafts: int, tmp_path: Path, device: str) -> None:
    """Greedy, through prefill in chunks, preemption and graphs; ended by a token at times."""
    model = reference(eos_token_id=[3, 11])
    model.save_pretrained(tmp_path)
    loaded = with_caches(load_llama(tmp_path), device)
    assert loaded.config.stop_tokens == {3, 11}
    prompts = [torch.randint(60, (length,)).tolist() for length in (3, 20, 9, 14, 5, 11)]
    requests = [
        Request(number, prompt, 12, number // 2, loaded.config.stop_tokens)
        for number, prompt in enumerate(prompts)
    ]
    served = serve(loaded, requests, draft=NgramDraft() if drafts else None, k=drafts)
    for prompt, output in zip(prompts, served.output, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        assert output == whole[0, len(prompt) :].tolist()
    assert len({len(output) for output in served.output}) > 1  # some ended early
    assert len({token for output in served.output for token in output}) > 10
    assert served.engine.runner.replays > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; supported: 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "the rope type is 'yarn'; supported: 'def"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope type is 'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.+ has no place in a Llama of 1 layers"),
        ({"num_hidden_layers": 3}, "no tensor for layers.2.attention_norm.weight"),
        ({"intermediate_size": 40}, r"gate_up.weight is \[96, 32\]; config.json has \[80, 32\]"),
    ],
)
def test_what_it_cannot_run_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reference().save_pretrained(tmp_path)
    change(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_llama(tmp_path)


def test_tensors_that_are_unknown_or_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file(good | {bias: torch.zeros(32)}, path)
    with pytest.raises(CheckpointError, match=f"tensor {bias} has no place"):
        load_llama(tmp_path)
    save_file({k: v for k, v in good.items() if "layers.1.self_attn.k_proj" not in k}, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.qkv.*self_attn\.k_proj is"):
        load_llama(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(good | old, path)
    load_llama(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors in"):
        load_llama(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        load_llama(tmp_path / "nowhere")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names {shard.name}, which is not in"):
        load_llama(tmp_path)
