"""Where two runs part, and how close a call that was.

Padding changes which kernel multiplies, and with it the last bits: a token that leads by less than
rounding may lose. A wrong graph does not care how close the call was, so the distance tells the two
apart: it is measured by the plain model, on the tokens up to where the runs part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cgcompile import set_forward_context
from llm_engine.attention import PagedMetadata
from llm_engine.model import Llama
from llm_engine.scheduler import Request


@dataclass(frozen=True)
class Parting:
    """The first difference in the output of a request.

    Attributes:
        number: of the request.
        position: of the token, in its output.
        gap: between the logits of the two tokens, in standard deviations of all logits; infinite
            where one output ends.
        spacing: between neighbouring numbers of the dtype at the larger one, in the same unit.
    """

    number: int
    position: int
    gap: float
    spacing: float = 0.0


def partings(
    expected: Sequence[Request], actual: Sequence[Request], model: Llama
) -> tuple[Parting, ...]:
    """Of the requests whose output differs; overwrites the model's caches."""
    parts = []
    for one, other in zip(expected, actual, strict=True):
        if one.output == other.output:
            continue
        pairs = list(zip(one.output, other.output, strict=False))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gap, spacing = float("inf"), 0.0
        if position < len(pairs):
            logits = plain_logits(model, one.tokens[: len(one.prompt) + position])[-1]
            gap, spacing = _gap(logits, *pairs[position])
        parts.append(Parting(one.number, position, gap, spacing))
    return tuple(parts)


def partings_from_plain(requests: Sequence[Request], model: Llama) -> tuple[Parting, ...]:
    """Of the requests whose output differs from the greedy one of the model without graphs.

    Each output is read at once: its first token that the model would not have chosen is where a
    greedy run of the model parts from it. Overwrites the model's caches.
    """
    parts = []
    for request in requests:
        logits = plain_logits(model, request.tokens[:-1])[len(request.prompt) - 1 :]
        best = logits.argmax(-1).tolist()
        apart = [i for i, token in enumerate(request.output) if token != best[i]]
        if apart:
            position = apart[0]
            gap = _gap(logits[position], best[position], request.output[position])
            parts.append(Parting(request.number, position, *gap))
    return tuple(parts)


def _gap(logits: torch.Tensor, one: int, other: int) -> tuple[float, float]:
    """Between two tokens, and between numbers of the dtype there, in standard deviations."""
    first, second = logits[[one, other]].float().tolist()
    deviation = float(logits.float().std())
    _, exponent = math.frexp(max(abs(first), abs(second)))
    spacing = torch.finfo(logits.dtype).eps * 2.0 ** (exponent - 1)
    return abs(first - second) / deviation, spacing / deviation


def plain_logits(model: Llama, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, vocab] of a whole text at once, by the model as it is; overwrites its caches."""
    device, size = model.embed.weight.device, model.block_size
    positions = torch.arange(len(tokens), device=device)
    blocks = 1 + torch.arange(-(-len(tokens) // size), device=device, dtype=torch.int32)[None]
    metadata = PagedMetadata(blocks, torch.zeros_like(positions, dtype=torch.int32), positions)
    with torch.inference_mode(), set_forward_context(metadata):
        ids = torch.tensor(tokens, device=device)
        return model.logits(model(ids, positions, positions + size))
