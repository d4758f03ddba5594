"""``custom_generate`` of transformers: tokens of ``generate`` on small models with random weights."""

import copy
import doctest
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import cgcompile
from cgcompile.errors import ConfigError, DispatchError
from cgcompile.integrations import next_token
from cgcompile.integrations.decode_inputs import NotHeld, described
from cgcompile.integrations.transformers import Generate, _Keeper, generate
from cgcompile.reasons import Reason

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = {"sliding_window": 16}
RANDOM = torch.Generator().manual_seed(5)  # prompts: the default one is seeded for both loops


def decoder(kind: str, config: str = "", **sizes: Any) -> Any:
    """Return a causal language model of a kind."""
    make = getattr(transformers, (config or kind) + "Config")
    return getattr(transformers, kind + "ForCausalLM")(make(**{**SIZES, **sizes}))


def gemma3() -> Any:
    layers = ["sliding_attention", "full_attention"]
    make = transformers.Gemma3ForCausalLM
    config = transformers.Gemma3TextConfig(**SIZES, **SLIDING, head_dim=8, layer_types=layers)
    return make(config)


def gemma3n() -> Any:
    """Return a model whose last layers share keys and values of others."""
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8, "head_dim": 8}
    sizes |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    layers = ["sliding_attention", "full_attention"] * 2
    more = {"layer_types": layers, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.Gemma3nTextConfig(**{**SIZES, **sizes, **more})
    return transformers.Gemma3nForCausalLM(config)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    ends = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, initializer_range=0.4)
    return transformers.GPT2LMHeadModel(config)


def mamba() -> Any:
    ends = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4}
    config = transformers.MambaConfig(**sizes, **ends, initializer_range=0.5)
    return transformers.MambaForCausalLM(config)


def longrope() -> Any:
    """Return a model whose rotary embedding has other frequencies in a longer text."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
    return decoder("Phi3", rope_parameters={**rope, **factors}, original_max_position_embeddings=24)


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ends = {"eos_token_id": None, "decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**sizes, **ends, vocab_size=VOCABULARY, initializer_factor=3.0)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64}
    sizes |= {"decoder_ffn_dim": 64, "max_source_positions": 20, "max_target_positions": 64}
    ends = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **ends, num_mel_bins=8, init_std=0.4)
    return transformers.WhisperForConditionalGeneration(config)


def llava() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(
        **sizes, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_id=VOCABULARY - 1,
        vision_feature_layer=-1,
        pad_token_id=0,
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: decoder("Llama"),
    "qwen3": lambda: decoder("Qwen3", head_dim=8),
    "mistral": lambda: decoder("Mistral", **SLIDING),
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gpt2": gpt2,
    "mamba": mamba,
    "mixtral": lambda: decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "t5": t5,
}


def build(name: str = "llama") -> Any:
    """Return a model that never ends a text by itself, with a seed of its own."""
    torch.manual_seed(7)
    model = {**MODELS, "whisper": whisper, "llava": llava, "longrope": longrope}[name]().eval()
    if name != "whisper":
        model.generation_config.eos_token_id = None
    return model


def prompt(rows: int = 2, length: int = 6, padded: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens, with padding at the left of the first row."""
    ids = torch.randint(1, VOCABULARY - 1, (rows, length), generator=RANDOM)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    ids[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, own: Generate, inputs: Any, **settings: Any) -> tuple[Any, Any]:
    """Return the tokens of the loop of transformers and those of ``own``, with the same seed."""
    settings = {"do_sample": False, "max_new_tokens": 10, **settings}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    torch.manual_seed(3)
    return expected, model.generate(**inputs, **settings, custom_generate=own)


def check(model: Any, own: Generate, inputs: Any, **settings: Any) -> torch.Tensor:
    """Compare the tokens; return them."""
    expected, tokens = both(model, own, inputs, **settings)
    assert torch.equal(tokens, expected), settings
    return torch.as_tensor(expected)


@pytest.fixture(autouse=True)
def recorded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")


@pytest.fixture(scope="module")
def llama() -> Any:
    return build()


# ---------------------------------------------------------------- tokens


def test_calls_of_all_lengths_share_one_capture(llama: Any) -> None:
    own, texts = Generate(steps=4), []
    for length in (3, 11, 6):
        texts.append(check(llama, own, prompt(length=length))[:, length:].tolist())
    assert texts[0] != texts[1] != texts[2]
    assert (own.counters.captures, own.counters.replays) == (1, 2)
    assert not own.counters.plain


def test_padding_and_ends_of_rows(llama: Any) -> None:
    """Rows end at different steps; what follows is padding, and the text ends with the last row."""
    own = Generate(steps=3)
    plain = llama.generate(**prompt(3, 8, padded=3), do_sample=False, max_new_tokens=10)
    ends = plain[:, 10].tolist() + list(range(60, 76))  # those of the third step, and many others
    shapes = set()
    for padded in (0, 3, 5):
        expected = check(llama, own, prompt(3, 8, padded), eos_token_id=ends, max_new_tokens=30)
        shapes.add(expected.shape[1])
    assert len(shapes) > 1
    assert max(shapes) < 38, "no text has ended"
    assert (own.counters.captures, own.counters.replays) == (1, 2)


@pytest.mark.slow
def test_samples_with_the_same_seed(llama: Any) -> None:
    own, texts = Generate(steps=4), []
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    for length in (4, 7):
        texts.append(check(llama, own, prompt(length=length), **settings)[:, length:])
    greedy = llama.generate(**prompt(), do_sample=False, max_new_tokens=10)
    assert not torch.equal(texts[1], greedy[:, 6:])
    assert (own.counters.captures, own.counters.replays) == (1, 1)


@pytest.mark.slow
def test_other_seeds_give_other_texts(llama: Any) -> None:
    own, texts, inputs = Generate(steps=4), set(), prompt()
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = llama.generate(**inputs, do_sample=True, max_new_tokens=8, custom_generate=own)
        texts.add(tuple(tokens[:, 6:].flatten().tolist()))
    assert len(texts) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Prompts of random lengths, padding, ends, greedy and sampled; windows are crossed."""
    model, own = build(name), Generate(steps=4)
    encodes = model.config.is_encoder_decoder
    for rows, length, padded in ((2, 9, 0), (5, 20, 0), (2, 12, 5)):
        inputs = prompt(rows, length, padded)
        if encodes:  # padding at the right
            inputs = {key: value.flip(-1) for key, value in inputs.items()}
        for settings in (
            {"repetition_penalty": 1.5},
            {"do_sample": True, "top_k": 20, "temperature": 0.8},
            {"eos_token_id": list(range(40, 56)), "min_new_tokens": 3},
        ):
            check(model, own, inputs, max_new_tokens=14, **settings)
    # Two numbers of rows, three kinds of steps.
    assert (own.counters.captures, own.counters.replays) == (6, 3)


@pytest.mark.slow
def test_frequencies_that_follow_the_length() -> None:
    """A step writes those of a rotary embedding; where they change, the text is run anew."""
    model, own = build("longrope"), Generate(steps=4)
    for length, new in ((5, 8), (30, 6), (7, 17), (25, 9)):
        check(model, own, prompt(length=length), max_new_tokens=new)
    assert (own.counters.captures, own.counters.replays) == (1, 3)
    for length, new in ((20, 12), (24, 1), (24, 2), (23, 2), (5, 30)):
        check(model, own, prompt(length=length), max_new_tokens=new)
    assert "across position 24" in own.counters.details[Reason.OWN_LOOP]


def test_frequencies_that_change_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CGCOMPILE_CAPTURE_DEVICE")
    check(build("longrope"), Generate(), prompt(length=20), max_new_tokens=12)


@pytest.mark.slow
def test_random_prompts() -> None:
    """36 prompts of 1 to 8 rows: a capture for each number of rows, with and without ends."""
    model, own = build(), Generate(steps=4, caches=8)
    lengths = torch.randint(1, 40, (36,)).tolist()
    for number, length in enumerate(lengths):
        inputs = prompt(1 + number % 8, length, padded=number % 3 if length > 4 else 0)
        ends = {"eos_token_id": [5, 17, 44, 71]} if number % 3 else {}
        check(model, own, inputs, max_new_tokens=12, **ends)
    assert (own.counters.captures, own.counters.replays) == (16, 20)


@pytest.mark.slow
def test_whisper() -> None:
    model, own = build("whisper"), Generate(steps=4)
    for _ in range(3):
        inputs = {"input_features": torch.randn(2, 8, 40, generator=RANDOM)}
        check(model, own, inputs, max_new_tokens=20, suppress_tokens=[4, 5])
    assert (own.counters.captures, own.counters.replays) == (1, 2)


@pytest.mark.slow
def test_vision_language_model() -> None:
    model, own = build("llava"), Generate(steps=4)
    for length in (3, 8, 5):
        image = torch.full((2, 4), VOCABULARY - 1)
        ids = torch.cat(
            (image, torch.randint(1, VOCABULARY - 1, (2, length), generator=RANDOM)), dim=1
        )
        inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=RANDOM)}
        check(model, own, {**inputs, "attention_mask": torch.ones_like(ids)})
    assert (own.counters.captures, own.counters.replays) == (1, 2)


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {name: size for name, size in SIZES.items() if name != "pad_token_id"}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {"mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        pad_token_id=0,
        **dict(zip(names, (90, 91, 92, 93), strict=True)),
    )
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


@pytest.mark.slow
def test_attributes_that_each_call_replaces() -> None:
    """A prompt of Qwen2-VL sets the offsets of its positions, which are held at an address."""
    model, own = qwen2_vl(), Generate(steps=4)
    model.generation_config.eos_token_id = None
    offsets = set()
    for length in (3, 8, 5, 4):
        words = torch.randint(1, 90, (length,), generator=RANDOM).tolist()
        ids = torch.tensor([[92, *[90] * (4 if length != 5 else 16), 93, *words]])
        patches, side = (16, 4) if length != 5 else (64, 8)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(patches, 96, generator=RANDOM),
            "image_grid_thw": torch.tensor([[1, side, side]]),
            "mm_token_type_ids": (ids == 90).int(),
        }
        check(model, own, inputs)
        offsets.add(model.model.rope_deltas.item())
    assert len(offsets) > 1
    assert (own.counters.captures, own.counters.replays) == (2, 2)


def test_one_new_token(llama: Any) -> None:
    own = Generate()
    assert check(llama, own, prompt(), max_new_tokens=1).shape == (2, 7)


@pytest.mark.slow
def test_embeddings_as_a_prompt(llama: Any) -> None:
    own = Generate(steps=4)
    for length in (4, 9):
        embeddings = torch.randn(2, length, 32, generator=RANDOM)
        check(llama, own, {"inputs_embeds": embeddings})
    assert (own.counters.captures, own.counters.replays) == (1, 1)


# ---------------------------------------------------------------- processors and criteria

PROCESSORS: dict[str, dict[str, Any]] = {
    "min_length": {"min_length": 12, "eos_token_id": list(range(1, 60))},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(1, 60))},
    "repetition": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(5, 96))},
    "long_ngram": {"no_repeat_ngram_size": 4, "suppress_tokens": list(range(2, 96))},
    "bad_words": {"bad_words_ids": [[5], [9, 17], [3, 4, 5], *([[n, 7] for n in range(20, 90)])]},
    "sequence_bias": {"sequence_bias": {(5,): 4.0, (9,): 5.0, (9, 5): -9.0, (5, 9, 9): 3.0}},
    "forced_eos": {"forced_eos_token_id": 11, "eos_token_id": 11},
    "suppress": {"suppress_tokens": list(range(1, 80))},
    "begin_suppress": {"begin_suppress_tokens": list(range(1, 90))},
    "invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "min_p": {"do_sample": True, "min_p": 0.05},
    "typical": {"do_sample": True, "typical_p": 0.8},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01, "temperature": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name: str) -> None:
    """Calls of other lengths share a step, and the processors read the lengths of their own."""
    model, own, settings = build(), Generate(steps=4), PROCESSORS[name]
    same = True
    for length in (2, 6, 10):
        inputs = prompt(3, length)
        expected = check(model, own, inputs, max_new_tokens=14, **settings)
        without = model.generate(**inputs, max_new_tokens=14, do_sample=False)
        same &= torch.equal(expected, without)
    assert same == (name == "invalid_values"), "it has no effect"
    assert (own.counters.captures, own.counters.replays) == (1, 2)


@pytest.mark.slow
def test_processors_of_an_encoder() -> None:
    model, own = build("t5"), Generate(steps=4)
    for length in (5, 12):
        check(model, own, prompt(2, length), encoder_repetition_penalty=1.5)
    assert (own.counters.captures, own.counters.replays) == (1, 1)


@pytest.mark.slow
def test_numbers_of_processors_are_not_baked_in(llama: Any) -> None:
    """Another temperature is another step; another minimum length is not."""
    own = Generate(steps=4)
    for temperature in (0.7, 1.4):
        check(llama, own, prompt(), do_sample=True, temperature=temperature)
    assert own.counters.captures == 2
    ends = {"eos_token_id": list(range(1, 60))}
    for least in (3, 8):
        check(llama, own, prompt(), min_new_tokens=least, **ends)
    assert own.counters.captures == 3


class Favour(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (input_ids.shape[1] % 2) * torch.arange(VOCABULARY)


class Temperature(transformers.TemperatureLogitsWarper):
    """A subclass, which may read anything."""


class StopAt(StoppingCriteria):
    """Ends each row where it is one column longer than the row before; notes what it was given."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        assert scores is None
        self.texts.append(input_ids.tolist())
        return input_ids.shape[1] >= self.columns + torch.arange(input_ids.shape[0])


OWN_WAY: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "beams": ("beam_search", lambda: {"num_beams": 2}),
    "attentions": (
        "output_attentions",
        lambda: {"return_dict_in_generate": True, "output_attentions": True},
    ),
    "hidden states": (
        "output_hidden_states",
        lambda: {"return_dict_in_generate": True, "output_hidden_states": True},
    ),
    "a dictionary and a criterion": (
        "a criterion of yours",
        lambda: {
            "return_dict_in_generate": True,
            "stopping_criteria": StoppingCriteriaList([StopAt(9)]),
        },
    ),
    "no cache": ("use_cache=False", lambda: {"use_cache": False}),
    "a cache": ("a cache of yours", lambda: {"past_key_values": DynamicCache()}),
    "a processor": ("Favour", lambda: {"logits_processor": LogitsProcessorList([Favour()])}),
    "a subclass": (
        "Temperature",
        lambda: {"logits_processor": LogitsProcessorList([Temperature(0.5)])},
    ),
    "a decay": (
        "ExponentialDecayLengthPenalty",
        lambda: {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5},
    ),
    "eta": ("EtaLogitsWarper", lambda: {"do_sample": True, "eta_cutoff": 0.1}),
}


@pytest.mark.parametrize("name", OWN_WAY)
def test_what_runs_in_the_loop_of_generate(llama: Any, name: str) -> None:
    word, settings = OWN_WAY[name]
    own, inputs = Generate(), prompt()
    torch.manual_seed(3)
    first = {"do_sample": False, "max_new_tokens": 6, **settings()}
    expected = llama.generate(**inputs, **first)
    torch.manual_seed(3)
    second = {"do_sample": False, "max_new_tokens": 6, **settings()}
    tokens = llama.generate(**inputs, **second, custom_generate=own)
    if "return_dict_in_generate" in second:
        expected, tokens = expected.sequences, tokens.sequences
    assert torch.equal(tokens, expected)
    assert own.counters.plain == {Reason.OWN_LOOP: 1}
    assert own.counters.calls == 1
    assert word in own.counters.details[Reason.OWN_LOOP]


def test_a_model_without_a_static_cache() -> None:
    """GPT-Neo slices a table by the length of the cache."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    types = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(**sizes, attention_types=types, pad_token_id=0)
    model, own = transformers.GPTNeoForCausalLM(config).eval(), Generate()
    model.generation_config.eos_token_id = None
    check(model, own, prompt())
    assert "static cache" in own.counters.details[Reason.OWN_LOOP]


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_a_step_that_changes_the_model(compiles: bool) -> None:
    """A number that the forward changes would not change at a replay; numbers are drawn once."""
    backend = cgcompile.Backend(compiler="eager", capture_device="host") if compiles else None
    streamed = Collected()
    model, own = build(), Generate(steps=2, backend=backend, stream=streamed)
    plain = model.forward

    class Box:
        calls = 0

    box = Box()

    def forward(*args: Any, **kwargs: Any) -> Any:
        box.calls += 1
        result = plain(*args, **kwargs)
        result.logits = result.logits * (1 + box.calls % 3)
        return result

    model.forward = forward
    inputs, settings = prompt(rows=1), {"do_sample": True, "max_new_tokens": 8}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    box.calls = 0
    torch.manual_seed(3)
    first = model.generate(**inputs, **settings, custom_generate=own)
    why = "compiled code changes" if compiles else "box.calls"
    assert why in own.counters.details[Reason.OWN_LOOP]
    assert first.shape == expected.shape
    assert (len(streamed.values), streamed.ended) == (1 + 8, 1)
    box.calls = 0
    torch.manual_seed(3)
    second = model.generate(**inputs, **settings, custom_generate=own)
    assert torch.equal(second, expected) or compiles
    assert own.counters.plain == {Reason.OWN_LOOP: 2}


def test_strict_raises_where_the_loop_of_generate_has_to_run(llama: Any) -> None:
    backend = cgcompile.Backend(on_fallback="raise", compiler="eager", capture_device="host")
    with pytest.raises(DispatchError, match=r"own_loop.*beam_search"):
        llama.generate(**prompt(), num_beams=2, custom_generate=Generate(backend=backend))


@pytest.mark.slow
def test_a_text_ends_after_its_time(llama: Any) -> None:
    own = Generate(steps=2)
    tokens = llama.generate(
        **prompt(), do_sample=False, max_new_tokens=60, max_time=0.0, custom_generate=own
    )
    assert tokens.shape == (2, 6 + 1 + 2), "the first token, and one round"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("ends", [None, [5, 17, 44, 71]])
def test_a_criterion_of_yours(llama: Any, ends: Any, drafts: bool) -> None:
    """It gets each text that ``generate`` gives it, and rows end where it ends them."""
    own = Generate(steps=4, draft=noisy(llama) if drafts else None)
    for rows, columns in ((1, 9), (3, 9), (3, 13), (1, 7)):
        inputs, seen, texts = prompt(rows), [], []
        for how in (None, own):
            criterion = StopAt(columns)
            texts.append(
                llama.generate(
                    **inputs,
                    do_sample=False,
                    max_new_tokens=20,
                    eos_token_id=ends,
                    stopping_criteria=StoppingCriteriaList([criterion]),
                    custom_generate=how,
                )
            )
            seen.append(criterion.texts)
        assert torch.equal(*texts)
        assert texts[0].shape[1] <= columns + rows - 1
        assert seen[0] == seen[1]
    assert own.counters.captures + own.counters.replays == 4


class Raising(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise KeyError("of mine")


@pytest.mark.slow
def test_a_criterion_that_raises(llama: Any) -> None:
    """The kept cache serves the next call."""
    own, raising = Generate(steps=4), StoppingCriteriaList([Raising()])
    check(llama, own, prompt())
    with pytest.raises(KeyError, match="of mine"):
        llama.generate(**prompt(), stopping_criteria=raising, custom_generate=own)
    check(llama, own, prompt())
    assert (own.counters.captures, own.counters.replays) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, [5, 17, 44, 71]])
def test_stop_strings(llama: Any, ends: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"{chr(97 + n % 26)}{chr(97 + n // 26)}": n for n in range(VOCABULARY)}
    words["abcdef"] = words.pop("ab")  # by which transformers finds how tokens are joined
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="aa"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="aa")
    own, lengths = Generate(steps=4), set()
    for rows in (1, 3, 1, 3):
        criterion = transformers.StopStringCriteria(tokenizer, ["b", "cc"])
        settings = {"stopping_criteria": StoppingCriteriaList([criterion]), "eos_token_id": ends}
        expected = check(llama, own, prompt(rows), max_new_tokens=30, **settings)
        lengths.add(expected.shape[1])
    assert min(lengths) < 36, "no text has ended"
    assert (own.counters.captures, own.counters.replays) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "t5"])
def test_dictionaries(name: str) -> None:
    """Scores, logits, and a cache that goes on."""
    model, own = build(name), Generate(steps=4)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for rows, length, padded in ((2, 20, 0), (2, 12, 5)):
        inputs = prompt(rows, length, padded)
        if model.config.is_encoder_decoder:
            inputs = {key: value.flip(-1) for key, value in inputs.items()}
        for settings in ({"repetition_penalty": 1.5}, {"eos_token_id": list(range(40, 56))}):
            expected, result = both(model, own, inputs, max_new_tokens=10, **wanted, **settings)
            assert type(result) is type(expected)
            assert torch.equal(result.sequences, expected.sequences)
            for kind in ("scores", "logits"):
                assert len(result[kind]) == len(expected[kind])
                for one, other in zip(result[kind], expected[kind], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-3)
            assert result.keys() == expected.keys()
            layers = [
                getattr(one.cache, "self_attention_cache", one.cache).layers
                for one in (result, expected)
            ]
            for layer, other in zip(*layers, strict=True):
                assert type(layer) is type(other)
                if getattr(other, "keys", None) is not None:
                    assert layer.get_seq_length() == other.get_seq_length()
                    torch.testing.assert_close(layer.keys, other.keys, rtol=1e-3, atol=1e-4)
                    torch.testing.assert_close(layer.values, other.values, rtol=1e-3, atol=1e-4)
    assert (own.counters.captures, own.counters.replays) == (2, 2)


@pytest.mark.slow
def test_scores_belong_to_the_caller(llama: Any) -> None:
    own, inputs = Generate(steps=4), prompt()
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    first, again = both(llama, own, inputs, **wanted)
    check(llama, own, prompt(length=9))
    both(llama, own, prompt(length=9), **wanted)
    for one, other in zip(again.scores, first.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert own.counters.captures + own.counters.replays == 3


def test_processors_are_known_by_class() -> None:
    assert next_token.refusal([transformers.TopKLogitsWarper(5)]) == ""
    assert "Favour" in next_token.refusal([Favour()])
    assert "Temperature" in next_token.refusal([Temperature(0.5)])


def test_an_input_that_changes_from_token_to_token_is_not_held(llama: Any) -> None:
    ids, size = torch.ones(2, 1, dtype=torch.long), torch.ones(2, 3)
    prepared, after = {"input_ids": ids, "size": size}, {"input_ids": ids, "size": size + 1}
    with pytest.raises(NotHeld, match="the input size"):
        described(llama, prepared, lambda: after, None, {}, 0)


@pytest.mark.slow
def test_probabilities_that_are_not_numbers_raise(llama: Any) -> None:
    model = copy.deepcopy(llama)
    own, settings = Generate(steps=2), {"do_sample": True, "max_new_tokens": 6}
    model.generate(**prompt(), **settings, custom_generate=own)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        model.generate(**prompt(), **settings, custom_generate=own)


# ---------------------------------------------------------------- streams and threads


class Collected:
    """A streamer."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("settings", [{}, {"num_beams": 1, "eta_cutoff": 0.1, "do_sample": True}])
def test_streams(llama: Any, settings: dict[str, Any]) -> None:
    """It gets what ``generate`` passes: the prompt, each token, and the end."""
    expected, streamed, inputs = Collected(), Collected(), prompt(rows=1)
    settings = {"do_sample": False, "max_new_tokens": 9, **settings}
    torch.manual_seed(1)
    llama.generate(**inputs, **settings, streamer=expected)
    torch.manual_seed(1)
    llama.generate(**inputs, **settings, custom_generate=Generate(steps=4, stream=streamed))
    assert [value.tolist() for value in streamed.values] == [v.tolist() for v in expected.values]
    assert (len(streamed.values), streamed.ended) == (10, 1)


@pytest.mark.slow
def test_threads_have_a_cache_each() -> None:
    model, own = build(), Generate(steps=3)
    prompts = [prompt(length=length) for length in (4, 9, 5, 7)]
    expected = [model.generate(**p, do_sample=False, max_new_tokens=12) for p in prompts]
    wrong: list[Any] = []

    def run(number: int) -> None:
        for _ in range(3):
            tokens = model.generate(
                **prompts[number], do_sample=False, max_new_tokens=12, custom_generate=own
            )
            if not torch.equal(tokens, expected[number]):
                wrong.append(tokens)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert own.counters.calls == 12
    assert own.counters.replays >= 4, own.counters


# ---------------------------------------------------------------- drafts


def noisy(model: Any, amount: float = 0.05) -> Any:
    """Return a draft model that often proposes the token of a model, but not always."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.numel() > 1:
                weight.add_(amount * weight.std() * torch.randn_like(weight))
    return draft


def rounds_of(model: Any, own: Generate) -> int:
    """Return how many rounds ran, beside those that warm up."""
    kept = _Keeper.of(model).kept[own].values()
    counters = [steps.counters for one in kept for steps in one.loops.values()]
    return sum(one.captures + one.replays for one in counters)


@pytest.mark.slow
def test_drafts(llama: Any) -> None:
    """Rows accept different numbers of tokens, are padded, and end at different steps."""
    own = Generate(draft=noisy(llama, 0.02), draft_tokens=3)
    for rows, length, padded in ((1, 6, 0), (1, 11, 0), (3, 9, 4), (3, 5, 0)):
        check(llama, own, prompt(rows, length, padded), max_new_tokens=24)
    assert (own.counters.captures, own.counters.replays) == (2, 2)
    assert 4 * 23 / 4 < rounds_of(llama, own) < 4 * 23 - 10, "some tokens are accepted"
    ends = {"eos_token_id": list(range(40, 56)), "min_new_tokens": 3}
    lengths = {check(llama, own, prompt(3), max_new_tokens=30, **ends).shape[1] for _ in range(4)}
    assert len(lengths) > 1
    assert min(lengths) < 36, "no text has ended"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2"])
def test_drafts_of_models(name: str) -> None:
    """Windows are crossed; processors read what both models have seen."""
    model = build(name)
    if name == "gemma3":  # its masks are added
        model.set_attn_implementation("eager")
    own = Generate(draft=noisy(model), draft_tokens=2)
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    settings |= {"suppress_tokens": list(range(7, 96)), "eos_token_id": 6}
    for rows, length, padded in ((3, 12, 5), (1, 20, 0), (3, 7, 0)):
        check(model, own, prompt(rows, length, padded), max_new_tokens=12, **settings)
    assert (own.counters.captures, own.counters.replays) == (2, 1)


@pytest.mark.slow
def test_drafts_that_are_all_accepted_or_refused(llama: Any) -> None:
    torch.manual_seed(11)
    other = decoder("Llama", num_hidden_layers=1).eval()
    for draft, least, most in ((llama, 6, 8), (other, 12, 26)):
        own = Generate(draft=draft, draft_tokens=3)
        check(llama, own, prompt(1, 1), max_new_tokens=25)
        assert least <= rounds_of(llama, own) <= most


@pytest.mark.slow
def test_a_draft_up_to_the_last_position() -> None:
    """Proposals behind it have no position; those of a draft model with fewer are bounded."""
    model, other = gpt2().eval(), gpt2().eval()
    other.transformer.wpe = torch.nn.Embedding(20, 32)
    other.config.n_positions = 20
    model.generation_config.eos_token_id = None
    own = Generate(draft=other, draft_tokens=5)
    assert check(model, own, prompt(2, 100), max_new_tokens=28).shape == (2, 128)
    assert own.counters.captures == 1


def test_a_draft_behind_the_last_position(llama: Any) -> None:
    """Rotary positions go on; ``generate`` warns."""
    own = Generate(draft=noisy(llama, 0.02))
    assert check(llama, own, prompt(2, 120), max_new_tokens=20).shape == (2, 140)
    assert own.counters.captures == 1


@pytest.mark.slow
def test_samples_with_a_draft_have_the_distribution_of_the_model(llama: Any) -> None:
    own, inputs = Generate(draft=noisy(llama, 0.15), draft_tokens=3), prompt(1, 5)
    inputs = {name: value.repeat(2000, 1) for name, value in inputs.items()}
    settings = {"do_sample": True, "top_k": 3, "temperature": 1.4, "max_new_tokens": 4}
    texts = [tokens[:, 5:] for tokens in both(llama, own, inputs, **settings)]
    for length in (1, 2, 3):
        kinds = torch.cat(texts)[:, :length].unique(dim=0)
        counts = [
            (one[:, None, :length] == kinds).all(-1).sum(0).double() / len(one) for one in texts
        ]
        # Of two samples of 2,000: the expected distance is below sqrt(kinds / (pi * 2000)).
        distance = (counts[0] - counts[1]).abs().sum() / 2
        assert distance < 1.5 * (len(kinds) / (torch.pi * 2000)) ** 0.5
    assert own.counters.captures == 1


def test_a_draft_with_another_vocabulary_is_refused(llama: Any) -> None:
    own = Generate(draft=decoder("Llama", vocab_size=50).eval())
    with pytest.raises(ConfigError, match=r"draft model of 50 tokens.*\n?.*the model has 96"):
        llama.generate(**prompt(), max_new_tokens=4, custom_generate=own)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", ["t5", "mamba", "longrope", "opt"])
def test_models_without_drafts(name: str, compiles: bool) -> None:
    """Encoders, states that cannot go back, frequencies of the last of several tokens.

    OPT reads the length of its cache.
    """
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    model = decoder("OPT", **sizes).eval() if name == "opt" else build(name)
    backend = cgcompile.Backend(compiler="eager", capture_device="host") if compiles else None
    own = Generate(draft=copy.deepcopy(model), backend=backend)
    check(model, own, prompt(), max_new_tokens=6)
    assert "a draft with" in own.counters.details[Reason.OWN_LOOP]


@pytest.mark.slow
def test_a_stream_with_a_draft(llama: Any) -> None:
    expected, streamed, inputs = Collected(), Collected(), prompt(rows=1)
    settings = {"do_sample": False, "max_new_tokens": 9}
    llama.generate(**inputs, **settings, streamer=expected)
    own = Generate(stream=streamed, draft=noisy(llama))
    llama.generate(**inputs, **settings, custom_generate=own)
    assert [value.tolist() for value in streamed.values] == [v.tolist() for v in expected.values]


@pytest.mark.slow
def test_a_backend_compiles_both_forwards(llama: Any) -> None:
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    own = Generate(backend=backend, draft=noisy(llama), draft_tokens=2)
    for rows, length in ((1, 3), (3, 8), (1, 5), (3, 4)):
        check(llama, own, prompt(rows, length))
    assert (own.counters.captures, own.counters.replays) == (2, 2)
    assert backend.counters.calls > 0
    assert [len(_Keeper.of(model).forwards[own]) for model in (llama, own.draft)] == [2, 2]
    own.release()
    assert not any(own in _Keeper.of(model).forwards for model in (llama, own.draft))


# ---------------------------------------------------------------- what is kept


@pytest.mark.slow
def test_threads_one_after_another(llama: Any) -> None:
    """A thread may have the id of one that has ended, and so its cache."""
    own, inputs, errors = Generate(steps=4), prompt(), []
    expected = llama.generate(**inputs, do_sample=False, max_new_tokens=6)

    def run() -> None:
        settings = {"do_sample": False, "max_new_tokens": 6, "custom_generate": own}
        if not torch.equal(llama.generate(**inputs, **settings), expected):
            errors.append("other tokens")

    for _ in range(4):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert errors == []
    assert own.counters.captures + own.counters.replays == 4


@pytest.mark.slow
def test_a_forward_that_is_replaced_on_the_instance(llama: Any) -> None:
    model, own = copy.deepcopy(llama), Generate(steps=4)
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    for padded in (0, 2):
        check(model, own, prompt(padded=padded))
    assert own.counters.captures + own.counters.replays == 2


@pytest.mark.slow
def test_autocast_of_some_calls(llama: Any) -> None:
    own, inputs = Generate(steps=4), prompt()
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            check(llama, own, inputs, max_new_tokens=5)
    assert (own.counters.captures, own.counters.replays) == (2, 2)


@pytest.mark.slow
def test_caches_are_bounded_and_released(llama: Any) -> None:
    own = Generate(steps=2, caches=2)
    for rows in (1, 2, 3, 1):
        check(llama, own, prompt(rows), max_new_tokens=5)
    assert own.counters.captures == 4, "that of one row has gone"
    assert repr(own) == "Generate(2 steps, 2 kept caches)"
    own.release()
    assert repr(own) == "Generate(2 steps, 0 kept caches)"
    check(llama, own, prompt(), max_new_tokens=5)
    assert own.counters.captures == 5


@pytest.mark.slow
def test_a_longer_text_gets_a_longer_cache(llama: Any) -> None:
    own = Generate(steps=4, max_cache_len=16)
    for new in (4, 30, 4, 30):
        check(llama, own, prompt(), max_new_tokens=new)
    assert (own.counters.captures, own.counters.replays) == (2, 2)
    assert repr(own) == "Generate(4 steps, 1 kept caches)"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_buffers_are_as_long_as_the_text(name: str) -> None:
    """Layers without attention have no length of their own."""
    model = build(name)
    few = {"suppress_tokens": list(range(6, 96)), "no_repeat_ngram_size": 3}
    for length, new in ((3, 14), (20, 10), (1, 17)):
        own = Generate(steps=4, max_cache_len=new - 1)
        check(model, own, prompt(length=length), max_new_tokens=new, **few)
        own = Generate(steps=4, max_cache_len=4)
        check(model, own, prompt(length=length), max_new_tokens=new, **few)
        assert own.counters.captures == 1


def test_rows_that_end_at_once(llama: Any) -> None:
    own = Generate(steps=4)
    every = list(range(VOCABULARY))
    assert check(llama, own, prompt(), eos_token_id=every).shape == (2, 7)


@pytest.mark.slow
def test_several_texts_of_a_prompt(llama: Any) -> None:
    own = Generate(steps=4)
    settings = {"do_sample": True, "num_return_sequences": 3}
    assert check(llama, own, prompt(), **settings).shape == (6, 16)
    check(llama, own, prompt(length=9, padded=2), **settings)
    assert (own.counters.captures, own.counters.replays) == (1, 1)


@pytest.mark.slow
def test_a_model_is_not_kept_alive() -> None:
    model, own = build(), Generate(steps=2)
    check(model, own, prompt(), max_new_tokens=5)
    copied = copy.deepcopy(model)
    assert repr(own) == "Generate(2 steps, 1 kept caches)", "a copy has none"
    check(copied, own, prompt(), max_new_tokens=5)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert repr(own) == "Generate(2 steps, 1 kept caches)"


@pytest.mark.slow
def test_a_copy_has_the_settings_and_no_caches(llama: Any) -> None:
    first = Generate(steps=2, max_cache_len=40)
    check(llama, first, prompt(), max_new_tokens=4)
    for second in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert repr(second) == "Generate(2 steps, 0 kept caches)"
        assert (second.max_cache_len, second.caches, second.backend) == (40, 4, None)
        check(llama, second, prompt(), max_new_tokens=4)
        assert (first.counters.captures, second.counters.captures) == (1, 1)
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    copied = copy.deepcopy(Generate(backend=backend))
    assert copied.backend is not backend
    assert copied.backend.config == backend.config


@pytest.mark.slow
def test_replaced_weights_are_read(llama: Any) -> None:
    model = copy.deepcopy(llama)
    own, inputs, texts = Generate(steps=2), prompt(), set()
    for _ in range(3):
        texts.add(tuple(check(model, own, inputs, max_new_tokens=8).flatten().tolist()))
        weight = torch.randn(VOCABULARY, 32, generator=RANDOM)
        model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert len(texts) == 3
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    check(model, own, inputs, max_new_tokens=8)


@pytest.mark.slow
def test_inference_mode_of_some_calls(llama: Any) -> None:
    own = Generate(steps=2)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            check(llama, own, prompt(), max_new_tokens=6)
    assert (own.counters.captures, own.counters.replays) == (1, 2)


@pytest.mark.slow
def test_memory_is_flat_over_calls(llama: Any) -> None:
    own = Generate(steps=4)

    def run(count: int) -> int:
        for number in range(count):
            inputs = prompt(length=2 + number % 5)
            llama.generate(**inputs, do_sample=False, max_new_tokens=6, custom_generate=own)
        gc.collect()
        return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())

    run(2)
    before = run(3)
    assert run(12) == before
    assert own.counters.captures == 1


# ---------------------------------------------------------------- compiled


@pytest.mark.slow
def test_a_backend_compiles_the_forward(llama: Any) -> None:
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    own = Generate(steps=4, backend=backend)
    for length in (3, 8, 5):
        check(llama, own, prompt(length=length))
    assert (own.counters.captures, own.counters.replays) == (1, 2)
    assert backend.counters.calls > 0
    assert not backend.counters.captures


@pytest.mark.slow
def test_a_cache_that_is_made_anew_compiles_nothing(llama: Any) -> None:
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    backend = cgcompile.Backend(compiler=compiler, capture_device="host")
    own = Generate(steps=2, backend=backend, caches=1)
    for rows in (1, 2):
        check(llama, own, prompt(rows), max_new_tokens=5)
    compiled = len(graphs)
    for rows in (1, 2, 1):
        check(llama, own, prompt(rows), max_new_tokens=5)
    assert len(graphs) == compiled > 0
    assert own.counters.captures == 5


@pytest.mark.slow
def test_a_compiled_model_is_compiled_as_a_part_of_the_step() -> None:
    model = build()
    handle = cgcompile.Backend(compiler="eager", capture_device="host")
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    model.forward = torch.compile(model.forward, backend=handle)
    own = Generate(steps=4, backend=backend)
    for length in (3, 8):
        check(model, own, prompt(length=length))
    assert backend.counters.calls > 0
    assert (own.counters.captures, own.counters.replays) == (1, 1)
    check(model, own, prompt(), disable_compile=True)
    assert "a compiled model" in own.counters.details[Reason.OWN_LOOP]


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_a_number_of_the_model_that_changes_between_calls(compiles: bool) -> None:
    """Dynamo bakes it into compiled code, whose guards no replay evaluates."""
    torch.manual_seed(7)
    model = decoder("Granite").eval()
    backend = cgcompile.Backend(compiler="eager", capture_device="host") if compiles else None
    own, inputs, texts = Generate(steps=3, backend=backend), prompt(), set()
    for number in (1.0, 1.0, 12.0, 1.0, 12.0, 0.1):
        model.model.embedding_multiplier = number
        texts.add(tuple(check(model, own, inputs).flatten().tolist()))
    assert len(texts) == 3
    if compiles:
        assert (own.counters.captures, own.counters.replays) == (3, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "mixtral"])
def test_models_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is compiled by default; tokens are those of eager, sampled ones too."""
    monkeypatch.delenv("CGCOMPILE_CAPTURE_DEVICE")
    model, own = build(name).cuda(), Generate(steps=4)
    kinds: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.5},
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"eos_token_id": list(range(40, 56)), "min_new_tokens": 3},
    )
    for length, padded in ((7, 0), (20, 0), (12, 5)):
        inputs = prompt(2, length, padded)
        if model.config.is_encoder_decoder:
            inputs = {key: value.flip(-1) for key, value in inputs.items()}
        inputs = {key: value.cuda() for key, value in inputs.items()}
        for settings in kinds:
            check(model, own, inputs, max_new_tokens=24, **settings)
    assert (own.counters.captures, own.counters.replays) == (3, 6)
    assert own.backend is not None
    assert own.backend.counters.calls > 0


@pytest.mark.gpu
def test_drafts_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forwards are compiled by default; rows accept different numbers of tokens."""
    monkeypatch.delenv("CGCOMPILE_CAPTURE_DEVICE")
    model = build()
    draft, model = noisy(model, 0.02).cuda(), model.cuda()
    own = Generate(draft=draft, draft_tokens=3)
    for length, padded in ((7, 0), (12, 5), (20, 0)):
        inputs = {key: value.cuda() for key, value in prompt(3, length, padded).items()}
        check(model, own, inputs, max_new_tokens=24)
    assert (own.counters.captures, own.counters.replays) == (1, 2)


def test_without_graphs_on_a_cpu(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CGCOMPILE_CAPTURE_DEVICE")
    own = Generate(steps=4)
    for length in (3, 8):
        check(llama, own, prompt(length=length), eos_token_id=[5, 6])
    assert own.counters.plain == {Reason.NO_DEVICE: 2}


def test_the_example_of_the_docstring() -> None:
    scope = {"torch": torch, "Generate": Generate}
    (example,) = doctest.DocTestFinder(recurse=False).find(Generate, "Generate", globs=scope)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert example.examples


def test_bad_settings() -> None:
    for settings in (
        {"steps": 0},
        {"steps": 1.5},
        {"caches": 0},
        {"max_cache_len": 0},
        {"draft_tokens": 0},
    ):
        with pytest.raises(ConfigError):
            Generate(**settings)
    assert generate.steps == 8
