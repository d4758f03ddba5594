"""How many calls are replayed in ``generate`` of transformers and in sentence-transformers.

Small models with random weights and tokens; every result is compared with eager. Prints the table
of the how-to page on transformers, without and with what that page recommends::

    CGCOMPILE_CAPTURE_DEVICE=host python examples/benchmarks/replay_shares.py --device cpu
    python examples/benchmarks/replay_shares.py          # on a GPU, compiled by Inductor

The rows of sentence-transformers are left out where it is not installed. Exits with 1 where a
result differs.
"""

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    CLIPVisionConfig,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import cgcompile
from cgcompile.serving import fit_sizes

WORDS, LONGEST = 90, 128
SMALL: dict[str, Any] = {
    "vocab_size": WORDS + 6,
    "initializer_range": 0.3,
    "max_position_embeddings": LONGEST,
}
SMALL |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "pad_token_id": 0}


class BeamCache(StaticCache):
    """A static cache whose rows are reordered in place."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        layers: list[Any] = self.layers
        for layer in layers:
            if layer.is_initialized:
                layer.keys.copy_(layer.keys.index_select(0, beam_idx))
                layer.values.copy_(layer.values.index_select(0, beam_idx))


# ---------------------------------------------------------------- generate


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=96, initializer_factor=3.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def whisper() -> Any:
    sizes: dict[str, Any] = {
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96}
    tokens: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 95,
        "decoder_start_token_id": 2,
    }
    none: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = WhisperConfig(**sizes, **tokens, **none, max_source_positions=40, init_std=0.5)
    return WhisperForConditionalGeneration(config)


def llava() -> Any:
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    text = LlamaConfig(**SMALL, num_key_value_heads=2)
    vision_config = CLIPVisionConfig(**vision)
    config = LlavaConfig(vision_config=vision_config, text_config=text, image_token_index=95)
    return LlavaForConditionalGeneration(config)


def prompt(model: Any, device: str, rows: int) -> dict[str, torch.Tensor]:
    """Return random inputs of the model."""
    if isinstance(model, WhisperForConditionalGeneration):
        return {"input_features": torch.randn(rows, 8, 80, device=device)}
    ids = torch.randint(1, WORDS, (rows, 12), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(model, LlavaForConditionalGeneration):
        ids[:, 2:6] = 95  # the image
        inputs["pixel_values"] = torch.randn(rows, 3, 16, 16, device=device)
    return inputs


@contextmanager
def compiled_forward(model: Any, backend: Any) -> Iterator[None]:
    model.forward = torch.compile(model.forward, backend=backend)
    try:
        yield
    finally:
        del model.forward


def generated(
    model: Any, way: str, chosen: argparse.Namespace, settings: dict[str, Any]
) -> tuple[float, bool]:
    """Return the share of replayed calls, and whether all tokens are those of eager."""
    torch._dynamo.reset()
    handle = cgcompile.Backend(compiler=chosen.compiler)

    def backend(graph: Any, inputs: Any) -> Any:  # generate() copies its configuration deeply
        return handle(graph, inputs)

    static: dict[str, Any] = {}
    if way in ("kept", "beams"):
        kind = StaticCache if way == "kept" else BeamCache
        static["past_key_values"] = kind(config=model.config, max_cache_len=64)
    elif way == "static":
        static["cache_implementation"] = "static"
    settled: dict[str, Any] = {"backend": backend, "mode": None}
    config: Any = CompileConfig(**settled)
    config._compile_all_devices = True  # transformers leaves the CPU out
    same = True
    for seed in range(chosen.rounds):
        inputs = prompt(model, chosen.device, 1 if "assistant_model" in settings else 2)
        more = {**settings, "max_new_tokens": 32}
        if "past_key_values" in static:
            static["past_key_values"].reset()
        torch.manual_seed(seed)
        expected = model.generate(**inputs, **more, disable_compile=True)
        torch.manual_seed(seed)
        if way in ("static", "kept"):
            tokens = model.generate(**inputs, **more, **static, compile_config=config)
        else:  # generate() compiles neither with a dynamic cache nor for beams
            with compiled_forward(model, backend):
                tokens = model.generate(**inputs, **more, **static, disable_compile=True)
        same &= torch.equal(tokens, expected)
    counters = handle.counters
    return counters.replays / max(counters.calls, 1), same


# ---------------------------------------------------------------- sentence-transformers


def sentences(count: int) -> list[str]:
    def words(length: int) -> str:
        return " ".join(f"w{random.randrange(WORDS)}" for _ in range(length))

    return [words(random.randint(3, LONGEST - 3)) for _ in range(count)]


def saved(model: Any, folder: str) -> str:
    with open(f"{folder}/vocab.txt", "w") as file:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        file.write("\n".join([*special, *(f"w{n}" for n in range(WORDS))]))
    BertTokenizer(f"{folder}/vocab.txt", model_max_length=LONGEST).save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return folder


def encoded(
    folder: str, kind: str, chosen: argparse.Namespace, lengths: Any = None
) -> tuple[float, bool, Counter[int]]:
    """Return the share of replayed calls, whether results are those of eager, and the lengths."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    torch._dynamo.reset()
    random.seed(0)
    pairs = kind == "rank"
    model = (CrossEncoder if pairs else SentenceTransformer)(folder, device=chosen.device)
    run: Any = model.predict if pairs else model.encode
    quiet = {"batch_size": 8, "show_progress_bar": False}
    calls: list[Any] = [sentences(64) for _ in range(chosen.rounds)]
    if pairs:
        calls = [[*zip(call, sentences(64), strict=True)] for call in calls]
    seen = Counter[int]()
    for call in calls:  # sorted by length, as the library does
        texts = [*zip(*call, strict=True)] if pairs else [call]
        tokens = model.tokenizer(*map(list, texts), truncation=True)["input_ids"]
        seen.update(sorted(map(len, tokens))[7::8])
    expected = [run(call, **quiet) for call in calls]
    handle = cgcompile.Backend(compiler=chosen.compiler, pad_lengths=lengths)
    model.compile(backend=handle)
    same = True
    for call, wanted in zip(calls, expected, strict=True):
        result = torch.as_tensor(run(call, **quiet))
        same &= torch.allclose(result, torch.as_tensor(wanted), atol=chosen.tolerance)
    counters = handle.counters
    return counters.replays / max(counters.calls, 1), same, seen


# ---------------------------------------------------------------- the table


def rows(chosen: argparse.Namespace) -> Iterator[tuple[str, list[tuple[str, float, bool]]]]:
    """Yield each case, with what was measured: (way, share of replays, results are right)."""
    greedy: dict[str, Any] = {"do_sample": False}
    beams, sampled = {**greedy, "num_beams": 3}, {"do_sample": True, "top_k": 20}
    cases: list[tuple[str, Callable[[], Any], dict[str, Any], tuple[str, ...]]] = [
        ("Llama, greedy", llama, greedy, ("dynamic", "static", "kept")),
        ("Llama, sampling", llama, sampled, ("dynamic", "static", "kept")),
        ("Llama, 3 beams", llama, beams, ("dynamic", "beams")),
        ("Llama, assisted", llama, greedy, ("dynamic", "static")),
        ("T5, greedy", t5, greedy, ("dynamic", "static")),
        ("Whisper, greedy", whisper, greedy, ("dynamic", "static")),
        ("LLaVA, greedy", llava, greedy, ("dynamic", "static")),
    ]
    for name, build, settings, ways in cases:
        torch.manual_seed(0)
        model = build().eval().to(chosen.device)
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        more = {**settings, "assistant_model": model} if "assisted" in name else settings
        yield name, [(way, *generated(model, way, chosen, more)) for way in ways]
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        return
    kinds = {"encode": BertModel, "rank": BertForSequenceClassification}
    for kind, cls in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            config = BertConfig(**SMALL)
            config.num_labels = 1
            saved(cls(config), folder)
            share, same, seen = encoded(folder, kind, chosen)
            ladder = fit_sizes(seen, count=6, maximum=LONGEST).sizes
            padded, right, _ = encoded(folder, kind, chosen, ladder)
        name = "encode" if kind == "encode" else "predict of a cross-encoder"
        yield name, [("as it is", share, same), ("pad_lengths", padded, right)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="", help="inductor on a GPU, else eager")
    parser.add_argument("--rounds", type=int, default=8, help="calls of generate or encode")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of embeddings and scores")
    chosen = parser.parse_args(argv)
    chosen.compiler = chosen.compiler or ("eager" if chosen.device == "cpu" else "inductor")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    wrong = False
    print("| case | calls replayed |\n|---|---|")
    with torch.inference_mode():
        for name, measured in rows(chosen):
            shares = [f"{way} {share:.0%}" for way, share, _ in measured]
            wrong |= not all(same for *_, same in measured)
            marks = [" WRONG" * (not same) for *_, same in measured]
            texts = (text + mark for text, mark in zip(shares, marks, strict=True))
            print(f"| {name} | {', '.join(texts)} |", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
