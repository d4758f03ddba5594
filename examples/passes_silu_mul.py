"""A pass of your own, with torch's pattern matcher: SiLU times up becomes one op.

Run it from anywhere; the weights are random, nothing is downloaded::

    pip install -e ".[examples]"
    python examples/passes_silu_mul.py
    python examples/passes_silu_mul.py --device cuda --hidden 1024 --intermediate 4096

In each layer of a Llama, ``silu(gate) * up`` is two ops. :class:`FuseSiluMul` finds them in the
graph that Dynamo traced, before it is split, and puts one op in their place. What stands behind
that op here are torch's own two kernels, so that results are equal bit by bit with uncompiled
pieces; yours would be a kernel that reads both inputs once. (Inductor fuses these two by itself.)

Printed: what the pass did and how long it took, and a step with it and without. The script exits
with 1 if it found fewer matches than layers, the results differ, or layers are no longer equal.
"""

import argparse
import operator
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.subgraph_rewriter import replace_pattern_with_filters
from transformers import LlamaConfig, LlamaForCausalLM

import cgcompile
from cgcompile.passes import PassRecord
from cgcompile.passes.split import SplitGraph

COMPILERS = ("inductor", "aot", "eager")
WARMUPS, STEPS = 3, 20


# ---------------------------------------------------------------- the op


@cache
def library() -> torch.library.Library:
    """Registers the op, once; an op goes with its library, so the library stays."""
    lib = torch.library.Library("cgcompile_example", "FRAGMENT")
    lib.define("silu_and_mul(Tensor gate, Tensor up) -> Tensor")
    lib.impl("silu_and_mul", lambda gate, up: F.silu(gate) * up, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "cgcompile_example::silu_and_mul", lambda gate, up: torch.empty_like(gate), lib=lib
    )
    return lib


def silu_and_mul() -> Callable[..., torch.Tensor]:
    """The op; asking for it defines it, importing this file does not."""
    library()
    op: Callable[..., torch.Tensor] = torch.ops.cgcompile_example.silu_and_mul.default
    return op


# ---------------------------------------------------------------- the pass


class FuseSiluMul:
    """Replace ``silu(gate) * up`` by one op."""

    name = "fuse_silu_mul"

    def uuid(self) -> str:
        return "fuse_silu_mul/1"  # another number whenever the pass does something else

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        # A pattern matches calls as they are spelled, and models spell this one in two ways.
        for spelled in ({}, {"inplace": False}):
            replace_pattern_with_filters(gm, _pattern(spelled), _replacement(), [_is_gated])
        return gm  # cgcompile fills in the fake values of new nodes


def _pattern(spelled: dict[str, bool]) -> fx.Graph:
    graph = fx.Graph()
    gate, up = graph.placeholder("gate"), graph.placeholder("up")
    activated = graph.call_function(F.silu, (gate,), spelled)  # type: ignore[arg-type]
    graph.output(graph.call_function(operator.mul, (activated, up)))
    return graph


def _replacement() -> fx.Graph:
    graph = fx.Graph()
    gate, up = graph.placeholder("gate"), graph.placeholder("up")
    graph.output(graph.call_function(silu_and_mul(), (gate, up)))
    return graph


def _is_gated(match: Any, graph: fx.Graph, pattern: fx.Graph) -> bool:
    """Whether both sides are results of matrix products: equal in layout, and never written.

    A pattern sees only calls; that the op does the same for these very tensors is to be checked.
    """
    gate, up = match.placeholder_nodes
    if not (_is_product(gate) and _is_product(up)):
        return False
    one, other = gate.meta["example_value"], up.meta["example_value"]
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is F.linear and len(node.users) == 1


# ---------------------------------------------------------------- showing that it works


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SiLU times up as one op, by a pass.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--compiler", default="eager", choices=COMPILERS, help="of pieces")
    sizes = {"layers": 4, "hidden": 64, "intermediate": 128, "batch": 2, "tokens": 9}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """A Llama with random weights; drawn on the CPU, so that every device gets the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        initializer_range=0.2,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.eval().to(args.device)


def run(
    model: torch.nn.Module, ids: torch.Tensor, compiler: str, passes: tuple[Any, ...]
) -> tuple[torch.Tensor, SplitGraph, float]:
    """The logits, the split, and the median seconds of a step."""
    torch._dynamo.reset()
    # No CUDA graphs: a replay takes as long as its kernels, and the op has the same ones.
    backend = cgcompile.Backend(compiler=compiler, passes=passes, cudagraph_mode="NONE")
    compiled = torch.compile(model, backend=backend)
    seconds = []
    with torch.inference_mode():
        for _ in range(WARMUPS + STEPS):
            started = time.perf_counter()
            logits: torch.Tensor = compiled(ids, use_cache=False).logits
            if logits.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return logits, backend.graphs[-1].split, sorted(seconds[WARMUPS:])[STEPS // 2]


def matches(record: PassRecord) -> int:
    """How often the pass put its op in."""
    return record.difference.get("cgcompile_example::silu_and_mul", 0)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    model = make_model(args)
    ids = torch.randint(96, (args.batch, args.tokens)).to(args.device)
    expected, before, seconds_before = run(model, ids, args.compiler, ())
    actual, after, seconds_after = run(model, ids, args.compiler, (FuseSiluMul(),))
    record = next(each for each in after.passes if each.name == FuseSiluMul.name)
    tolerance = 0.0 if args.compiler == "eager" else 1e-4

    print(after.passes_text())
    print()
    print(f"matches: {matches(record)} in {args.layers} layers")
    print(f"seconds of the pass: {record.seconds:.4f}")
    print(f"distinct pieces: {len(before.distinct)} without it, {len(after.distinct)} with it")
    print(f"ms of a step: {seconds_before * 1e3:.2f} without it, {seconds_after * 1e3:.2f} with it")
    difference = float((actual - expected).abs().max())
    print(f"largest difference: {difference:g}, allowed {tolerance:g}")
    broken = []
    if matches(record) < args.layers:
        broken.append(f"{matches(record)} matches in {args.layers} layers")
    if not difference <= tolerance:
        broken.append("the results differ")
    if len(before.distinct) != len(after.distinct):
        broken.append("layers that were equal are so no more")
    for problem in broken:
        print(f"BROKEN: {problem}")
    print(f"promises kept: {'no' if broken else 'yes'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
