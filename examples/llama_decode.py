"""Greedy decoding of transformers' own Llama through cgcompile, token for token as eager.

Run it from anywhere; the weights are random, nothing is downloaded::

    pip install -e ".[examples]"
    python examples/llama_decode.py
    python examples/llama_decode.py --device cuda --layers 8 --hidden 1024 --tokens 200

A prompt goes in at once (the prefill), then one token per step, each written to its place in a
key-value cache of fixed size. The model is transformers' code, untouched: cgcompile finds the
attention in the traced graph by itself. Without a GPU the steps are recorded by cgcompile's host
recorder, which is slow and keeps the rules of CUDA graphs. The script exits with 1 if one of these
promises is broken:

* the compiled model picks the same tokens as the plain one, in float32;
* every step is one call of one compiled graph: no graph break, nothing left uncompiled;
* there are few graphs (one for the prefill, one for all positions after it);
* all steps but four replay CUDA graphs: the prefill, a warming one and a capturing one do not.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import cgcompile
from cgcompile.runtime.compiled_graph import CompiledGraph

COMPILERS = ("inductor", "aot", "eager")
MAX_GRAPHS = 4
MAX_STEPS_WITHOUT_REPLAY = 4


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Greedy decoding of a Llama through cgcompile.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--compiler", default="inductor", choices=COMPILERS, help="of pieces")
    sizes = {
        "layers": 2,
        "hidden": 256,
        "intermediate": 512,
        "heads": 8,
        "kv-heads": 4,
        "vocab": 1000,
        "batch": 2,
        "prompt": 12,
        "tokens": 64,
        "seed": 0,
    }
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    return parser.parse_args(argv)


def on_cpu(args: argparse.Namespace) -> bool:
    return torch.device(args.device).type == "cpu"


def make_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.prompt + args.tokens,
        initializer_range=0.1,  # wide enough that the tokens do not settle on one
    )


def make_model(config: LlamaConfig, args: argparse.Namespace) -> torch.nn.Module:
    """A Llama with random weights; drawn on the CPU, so that every device gets the same."""
    torch.manual_seed(args.seed)
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.eval().to(args.device)


def make_cache(config: LlamaConfig, args: argparse.Namespace) -> StaticCache:
    """An empty key-value cache with its memory allocated.

    Left alone, the first update would allocate it: inside the graph of the prefill, so that the
    decode graph could not rely on its address.
    """
    cache = StaticCache(config=config, max_cache_len=args.prompt + args.tokens)
    head_dim, device = args.hidden // args.heads, torch.device(args.device)
    cache.early_initialization(args.batch, args.kv_heads, head_dim, torch.float32, device)
    return cache


def decode(
    model: Callable[..., Any], prompt: torch.Tensor, cache: StaticCache, count: int
) -> torch.Tensor:
    """``count`` tokens after the prompt, always the most likely one: (batch, count)."""
    tokens = prompt
    chosen = []
    for _ in range(count):
        logits = model(input_ids=tokens, past_key_values=cache).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(tokens)
    return torch.cat(chosen, dim=1)


def differing_step(expected: torch.Tensor, actual: torch.Tensor) -> int | None:
    """The first step at which some row has another token; None if all are equal."""
    steps = (expected != actual).any(dim=0).nonzero()
    return int(steps[0]) if len(steps) else None


def broken_promises(
    expected: torch.Tensor, actual: torch.Tensor, graphs: Sequence[CompiledGraph]
) -> list[str]:
    """What went wrong, a sentence each; empty if all is well."""
    broken = []
    step = differing_step(expected, actual)
    if step is not None:
        broken.append(f"the tokens differ from eager from step {step} on")
    for graph in graphs:
        if graph.split.graph_break is not None:
            broken.append(f"a graph ended by a graph break: {graph.split.graph_break}")
    calls = sum(graph.counters.calls for graph in graphs)
    if calls != expected.shape[1]:
        broken.append(f"{expected.shape[1]} steps made {calls} calls of compiled graphs")
    replays = sum(graph.counters.replays for graph in graphs)
    if replays < expected.shape[1] - MAX_STEPS_WITHOUT_REPLAY:
        broken.append(f"only {replays} of {expected.shape[1]} steps were replays")
    if len(graphs) > MAX_GRAPHS:
        broken.append(f"{len(graphs)} graphs, more than {MAX_GRAPHS}")
    return broken


def print_graphs(graphs: Sequence[CompiledGraph]) -> None:
    """The split of the graph that took most steps (decoding), then what all graphs did."""
    plain: Counter[str] = Counter()
    for graph in graphs:
        plain.update({reason.value: count for reason, count in graph.counters.plain.items()})
    captures = sum(graph.counters.captures for graph in graphs)
    replays = sum(graph.counters.replays for graph in graphs)
    if graphs:
        print(max(graphs, key=lambda graph: graph.counters.calls).split)
        print()
    print(f"graphs: {len(graphs)}")
    print(f"graph breaks: {sum(graph.split.graph_break is not None for graph in graphs)}")
    print(f"steps through compiled graphs: {[graph.counters.calls for graph in graphs]}")
    print(f"captures: {captures}, replays: {replays}, plain steps: {dict(plain) or 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_float32_matmul_precision("highest")  # no TF32: it could turn a close call
    config = make_config(args)
    model = make_model(config, args)
    options: dict[str, Any] = {
        "compiler": args.compiler,
        "capture_device": "host" if on_cpu(args) else "auto",
    }
    compiled = torch.compile(model, backend="cgcompile", options=options)

    with torch.inference_mode():
        prompt = torch.randint(args.vocab, (args.batch, args.prompt)).to(args.device)
        expected = decode(model, prompt, make_cache(config, args), args.tokens)
        actual = decode(compiled, prompt, make_cache(config, args), args.tokens)

    graphs = cgcompile.runtime(compiled).graphs
    print_graphs(graphs)
    print(f"tokens: {actual.numel()}, {len(set(actual.flatten().tolist()))} different ones")
    print(f"tokens identical: {'yes' if torch.equal(expected, actual) else 'no'}")
    broken = broken_promises(expected, actual, graphs)
    for problem in broken:
        print(f"BROKEN: {problem}")
    print(f"promises kept: {'no' if broken else 'yes'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
