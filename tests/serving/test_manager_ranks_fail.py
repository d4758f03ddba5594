"""What one rank alone refuses: the others learn of it at once, or have not counted on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.manager import FULL, Decoder, dispatcher, eager, manager, metadata, requests
from lib.ranks import caught, run_ranks
from torch import nn

from cgcompile.errors import AddressChangedError, ManagerError
from cgcompile.serving.batch import Batch, Metadata
from cgcompile.serving.errors import AgreementError, InputBufferError
from cgcompile.serving.ranks import Agreement

pytestmark = pytest.mark.slow

ERRORS = (AddressChangedError, AgreementError, InputBufferError, ManagerError, OSError)


class Preparing:
    """Fails once, in a given phase."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.made: Any = None

    def __call__(self, descriptor: Any, phase: str) -> Batch:
        if phase in self.errors:
            raise self.errors.pop(phase)
        return self.made.dummy_batch(descriptor, phase)


def planning(rank: int, ranks: int) -> Any:
    dispatch, prepare = dispatcher("FULL"), Preparing()
    graph_manager = manager(dispatch=Agreement(dispatch), prepare=prepare)
    prepare.made = graph_manager
    errors = []
    for phase, error in (("warmup", OSError("no host memory")), ("capture", ManagerError("own"))):
        if rank == 1:
            prepare.errors[phase] = error
        errors.append(caught(graph_manager.plan, ERRORS))
    errors.append(caught(lambda: graph_manager.capture(1 if rank == 1 else 1 << 40), ERRORS)[:33])
    bulks = graph_manager.capture(max_graph_bytes=1 << 40)  # ranks are in step again
    return errors, [len(bulk.captured) for bulk in bulks.values()]


def test_what_one_rank_refuses_while_it_plans_all_are_errors(tmp_path: Path) -> None:
    answers = run_ranks(planning, 2, tmp_path)
    gave_up = "AgreementError: rank 1 raised an exception in plan() or in a capture."
    assert answers[0][0] == [gave_up, gave_up, gave_up[:33]]
    errors = ["OSError: no host memory", "ManagerError: own", "ManagerError: max_graph_bytes=1: "]
    assert answers[1][0] == errors
    assert [answer[1] for answer in answers] == [[5]] * 2


def stepping(rank: int, ranks: int) -> Any:
    starts: list[Any] = []

    def building(batch: Batch, descriptor: Any, buffers: dict[str, Any]) -> Metadata:
        starts.append(buffers["query_start_loc"].tolist())
        return metadata(batch, descriptor, buffers)

    dispatch = dispatcher("FULL")
    model = Decoder()
    graph_manager = manager(
        dispatch=Agreement(dispatch, check=True), model=model, metadata=building
    )
    graph_manager.capture()
    errors = []

    def check(*lengths: int) -> None:
        batch = requests(*lengths)
        expected = eager(model, batch)
        torch.testing.assert_close(graph_manager.run(batch), expected, rtol=1e-5, atol=1e-5)

    # More requests than tokens on one rank: the graph has rows for all of them.
    steps = len(starts)
    check(*((1, 0, 1, 0, 1, 1) if rank == 1 else (2,)))
    errors.append((graph_manager.dispatched(requests(1, 0, 1, 0, 1, 1))[:2], starts[steps]))

    # Wrong inputs and moved weights: refused before the exchange, so that this rank may come again.
    batch = requests(3)
    wrong = {**batch.inputs, "positions": batch.inputs["positions"].int()}
    weight = model.embed.weight
    if rank == 1:
        errors.append(caught(lambda: graph_manager.run(replace(batch, inputs=wrong)), ERRORS))
        errors.append(caught(lambda: graph_manager.run(requests(65)), ERRORS))
        model.embed.weight = nn.Parameter(weight.detach().clone())
        errors += [
            caught(lambda step=step: graph_manager.run(step), ERRORS) for step in (batch, None)
        ]
        errors.append(caught(lambda: graph_manager.run_fullgraph(4), ERRORS))
        model.embed.weight = weight
    check(3)
    graph_manager.run_fullgraph(4)
    return errors


def test_what_one_rank_refuses_at_a_step_no_rank_has_begun(tmp_path: Path) -> None:
    answers = run_ranks(stepping, 2, tmp_path)
    (chosen, starts), *_ = answers[1]
    mode, descriptor = chosen
    assert (mode, descriptor.num_tokens, descriptor.num_reqs) == (FULL, 8, 8)  # alone
    assert starts == [0, 1, 1, 2, 2, 3, 4, 4, 4]
    assert answers[0][0][1] == [0, 2, *[2] * 7]
    errors = [each.partition(":")[0] for each in answers[1][1:]]
    assert errors == ["InputBufferError"] * 2 + ["AddressChangedError"] * 3
