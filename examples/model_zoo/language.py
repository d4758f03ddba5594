"""Language models of the zoo: decoders, encoders, encoder-decoders, of transformers."""

from typing import Any

from model_zoo.entries import (
    VOCABULARY,
    Entry,
    Inputs,
    from_config,
    masked_text,
    text,
    translated,
)

# Names that most configs agree on; what a config does not know is kept as an attribute, unread.
NARROW: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = NARROW | {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def decoder(
    name: str,
    model: str,
    structure: str,
    *,
    decodes: bool = True,
    plain: bool = False,
    slow: bool = False,
    **values: Any,
) -> Entry:
    """A causal language model. Plain: with the names of its config alone."""
    config = values if plain else GROUPED | values
    make = from_config(model, name, **config)
    settings = {"use_cache": False}
    return Entry(
        name,
        "decoder",
        structure,
        "transformers",
        make,
        masked_text,
        settings,
        decodes=decodes,
        slow=slow,
        widens=True,
    )


def encoder(
    name: str, model: str, structure: str, inputs: Inputs = masked_text, **values: Any
) -> Entry:
    """An encoder of text."""
    make = from_config(model, name, **(NARROW | values))
    return Entry(name, "encoder", structure, "transformers", make, inputs, {}, widens=True)


def translator(name: str, model: str, structure: str, **values: Any) -> Entry:
    """An encoder and a decoder of text."""
    make = from_config(model, name, vocab_size=VOCABULARY, **values)
    settings = {"use_cache": False}
    return Entry(
        name, "encoder-decoder", structure, "transformers", make, translated, settings, widens=True
    )


BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

DECODERS = (
    decoder("gpt2", "GPT2LMHeadModel", "learned positions", n_embd=32, n_layer=2, n_head=4),
    decoder("opt", "OPTForCausalLM", "positions from the mask", ffn_dim=64, word_embed_proj_dim=32),
    decoder("gpt_neox", "GPTNeoXForCausalLM", "partial rotary, parallel blocks"),
    decoder("gptj", "GPTJForCausalLM", "interleaved rotary", n_embd=32, n_layer=2, n_head=4,
            rotary_dim=4),
    # In some versions its ALiBi is as long as the tokens so far, not as a static cache.
    decoder("bloom", "BloomForCausalLM", "ALiBi", n_layer=2, n_head=4, decodes=False),
    decoder("mpt", "MptForCausalLM", "ALiBi, no biases", d_model=32, n_layers=2, n_heads=4,
            max_seq_len=64),
    decoder("falcon", "FalconForCausalLM", "multi-query", alibi=False),
    decoder("llama", "LlamaForCausalLM", "GQA, rotary"),
    decoder("mistral", "MistralForCausalLM", "sliding window", sliding_window=6),
    decoder("qwen2", "Qwen2ForCausalLM", "GQA, biases"),
    decoder("qwen3", "Qwen3ForCausalLM", "GQA, normed heads", head_dim=8),
    decoder("phi3", "Phi3ForCausalLM", "fused projections"),
    decoder("stablelm", "StableLmForCausalLM", "partial rotary, layer norm"),
    decoder("cohere2", "Cohere2ForCausalLM", "sliding and full layers", sliding_window=6),
    decoder("olmo2", "Olmo2ForCausalLM", "norms behind layers"),
    decoder("gemma2", "Gemma2ForCausalLM", "soft caps, sliding window", head_dim=8,
            sliding_window=6),
    decoder("gemma3_text", "Gemma3ForCausalLM", "two rotary bases", head_dim=8, sliding_window=6),
    decoder("gpt_oss", "GptOssForCausalLM", "attention sinks, experts", head_dim=8,
            sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    decoder("mixtral", "MixtralForCausalLM", "experts", num_local_experts=4,
            num_experts_per_tok=2),
    decoder("qwen3_moe", "Qwen3MoeForCausalLM", "experts", head_dim=8, num_experts=4, **EXPERTS),
    decoder("deepseek_v3", "DeepseekV3ForCausalLM", "latent attention, grouped experts",
            num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, kv_lora_rank=16,
            q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            first_k_dense_replace=1, **EXPERTS),
    decoder("mamba", "MambaForCausalLM", "state space", decodes=False, state_size=8,
            use_mambapy=False, time_step_rank=4),
    decoder("mamba2", "Mamba2ForCausalLM", "state space, chunked", decodes=False, num_heads=8,
            head_dim=8, state_size=8, n_groups=2, chunk_size=4),
    decoder("rwkv", "RwkvForCausalLM", "linear recurrence", decodes=False,
            attention_hidden_size=32, context_length=64),
    decoder("recurrent_gemma", "RecurrentGemmaForCausalLM", "gated recurrence, local attention",
            decodes=False, attention_window_size=8, lru_width=32,
            block_types=["recurrent", "attention"]),
    decoder("lfm2", "Lfm2ForCausalLM", "short convolutions, attention", decodes=False,
            layer_types=["conv", "full_attention"], block_multiple_of=16),
    decoder("jamba", "JambaForCausalLM", "state space, attention, experts", decodes=False,
            num_experts=4, num_experts_per_tok=2, use_mamba_kernels=False, mamba_d_state=8,
            mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1),
    # Slow: its graph holds 64 steps of the delta rule one by one, a number that no config changes.
    decoder("qwen3_next", "Qwen3NextForCausalLM", "gated delta rule, attention, experts",
            slow=True, decodes=False, head_dim=8, num_experts=4, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
            shared_expert_intermediate_size=32, **EXPERTS),
)  # fmt: skip

ENCODERS = (
    encoder("bert", "BertForSequenceClassification", "token types"),
    encoder("roberta", "RobertaForMaskedLM", "positions from the padding"),
    encoder("distilbert", "DistilBertForMaskedLM", "no token types", dim=32, hidden_dim=64,
            n_layers=2, n_heads=4),
    encoder("albert", "AlbertForMaskedLM", "shared layers", embedding_size=16),
    encoder("electra", "ElectraForPreTraining", "narrow embeddings", embedding_size=16),
    encoder("mpnet", "MPNetModel", "relative bias"),
    encoder("deberta-v2", "DebertaV2ForMaskedLM", "disentangled attention", pos_att_type=["p2c",
            "c2p"], relative_attention=True, position_buckets=8, max_relative_positions=16),
    encoder("modernbert", "ModernBertForMaskedLM", "local and global layers", local_attention=6,
            global_attn_every_n_layers=2, num_hidden_layers=3, reference_compile=False,
            sep_token_id=2, cls_token_id=1),
    encoder("fnet", "FNetForMaskedLM", "Fourier transform", text, tpu_short_seq_length=12),
    encoder("convbert", "ConvBertModel", "dynamic convolution", embedding_size=32,
            conv_kernel_size=3, head_ratio=2),
    encoder("longformer", "LongformerModel", "attention in windows", attention_window=4),
    Entry("xlnet", "encoder", "relative positions, two streams", "transformers",
          from_config("XLNetModel", "xlnet", vocab_size=VOCABULARY, d_model=32, n_layer=2,
                      n_head=4, d_inner=64), masked_text, {"use_mems": False}),
    encoder("esm", "EsmForMaskedLM", "proteins, rotary", position_embedding_type="rotary",
            mask_token_id=3),
)  # fmt: skip

TRANSLATORS = (
    translator("t5", "T5ForConditionalGeneration", "relative bias", **T5,
               decoder_start_token_id=0),
    translator("bart", "BartForConditionalGeneration", "cross attention", **BART,
               forced_eos_token_id=None),
    translator("pegasus", "PegasusForConditionalGeneration", "sinusoidal positions", **BART),
    translator("m2m_100", "M2M100ForConditionalGeneration", "positions from the padding", **BART),
    translator("switch_transformers", "SwitchTransformersForConditionalGeneration",
               "experts that are switched", **T5, num_experts=4, num_sparse_encoder_layers=1,
               num_sparse_decoder_layers=1, num_decoder_layers=2, decoder_start_token_id=0),
)  # fmt: skip
