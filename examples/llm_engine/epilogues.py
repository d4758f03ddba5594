"""What runs after a model in each step, inside of its graph: the epilogues of its managers.

Both write results of requests, not of tokens, so that an engine waits for the device once a step,
for one small copy.
"""

from collections.abc import Callable

import torch

from llm_engine.model import Llama
from llm_engine.scheduler import NULL_BLOCK

Buffers = dict[str, torch.Tensor]


class Choices:
    """The target's choice after each sampled row, and how many drafts are its own choice."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def __call__(self, hidden: torch.Tensor, buffers: Buffers) -> dict[str, torch.Tensor]:
        """``choices`` [R, k + 2] int64: those after the newest token and k drafts, then a count.

        With drafts ``begin`` [R, 3] int64 too, where the next round begins: the newest token of
        each request, its position and its slot.

        Args:
            hidden: [T, hidden], of all rows.
            buffers: with ``sampled`` [R, 1 + k] int64: the rows of the newest token of each request
                and of its drafts; of a prompt its last row, each time.
        """
        rows = buffers["sampled"]
        choices = self._model.greedy(hidden[rows])
        drafts = buffers["input_ids"][rows[:, 1:]]
        right = (drafts == choices[:, :-1]).cumprod(1).sum(1, keepdim=True)
        result = {"choices": torch.cat((choices, right), 1)}
        if rows.shape[1] > 1:
            positions = buffers["positions"][rows.gather(1, right)[:, 0]] + 1
            slots = next_slots(buffers["block_tables"], positions, self._model.block_size)
            newest = choices.gather(1, right)[:, 0]
            result["begin"] = torch.stack((newest, positions, slots), 1)
        return result


class DraftLoop:
    """The rest of a round of drafts: samples, advances and runs the model, k times.

    The step itself runs the model on the newest token of each request. The last run is for its keys
    and values alone: if all drafts are accepted, the next round begins behind them.
    """

    def __init__(self, model: Llama, step: Callable[..., torch.Tensor], k: int) -> None:
        self._model, self._step, self._k = model, step, k

    def __call__(self, hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """[R, 1 + k] int64: the newest token of each request and k drafts. Advances the buffers.

        Args:
            hidden: [R, hidden] of the newest tokens.
            buffers: a row for each request, and ``block_tables``.
        """
        ids, positions, slots = (buffers[n] for n in ("input_ids", "positions", "slot_mapping"))
        last = buffers["block_tables"].shape[1] * self._model.block_size - 1
        tokens = [ids.clone()]
        for _ in range(self._k):
            ids.copy_(self._model.greedy(hidden))
            tokens.append(ids.clone())
            positions.add_(1)
            slots.copy_(next_slots(buffers["block_tables"], positions, self._model.block_size))
            positions.clamp_(max=last)  # attention reads the table up to there
            hidden = self._step(ids, positions, slots)
        return torch.stack(tokens, 1)


def next_slots(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slot [R] of one position of each request, found on the device.

    It is in the null block for a request of padding, whose table has no other block, and behind the
    end of a table.

    Args:
        tables: [R, B] int32.
        positions: [R] int64.
        block_size: tokens in a block.
    """
    index, width = positions // block_size, tables.shape[1]
    blocks = tables.gather(1, index.clamp(max=width - 1)[:, None])[:, 0].long()
    return torch.where(index < width, blocks, NULL_BLOCK) * block_size + positions % block_size
