"""Managers of several ranks: idle ranks, uneven batches, refusals, ranks that stay away."""

import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.manager import (
    FULL,
    INPUTS,
    NONE,
    PIECEWISE,
    Decoder,
    dispatcher,
    eager,
    manager,
    requests,
)
from lib.patience import PATIENCE
from lib.ranks import caught, run_ranks

from cgcompile import BatchDescriptor, get_forward_context, verify
from cgcompile.errors import BatchError, ManagerError
from cgcompile.serving.batch import Batch, Metadata
from cgcompile.serving.buffers import InputBuffer
from cgcompile.serving.errors import AgreementError
from cgcompile.serving.plan import Axis, LoraCases
from cgcompile.serving.ranks import Agreement

DECODE, MIXED = True, False
IDLE: tuple[Any, ...] = ()
SLOTS = InputBuffer("slots", ("tokens",), torch.int64, -1, argument=False)
LENGTHS = InputBuffer("seq_lens", ("reqs",), torch.int32, 1, argument=False)

# Of each of three ranks (lengths, uniform decode), then what each runs: mode and padded tokens.
STEPS: tuple[tuple[Any, Any], ...] = (
    ([((1,) * 3, DECODE), (IDLE, MIXED), ((1,), DECODE)], [("FULL", 4)] * 3),
    ([((3, 2), MIXED), (IDLE, MIXED), ((1,), DECODE)], [("PIECEWISE", 8)] * 3),
    ([((20,), MIXED), (IDLE, MIXED), ((1,), DECODE)], [("NONE", 20), ("NONE", 1), ("NONE", 1)]),
    ([((16,), MIXED), ((1,) * 8, DECODE), ((5,), MIXED)], [("PIECEWISE", 16)] * 3),
    ([(IDLE, MIXED), (IDLE, MIXED), (IDLE, MIXED)], [None] * 3),
    ([(IDLE, MIXED), ((1, 1), DECODE), (IDLE, MIXED)], [("FULL", 2)] * 3),
)


def staged(*lengths: int, decode: bool) -> Batch:
    batch = requests(*lengths, decode=decode)
    more = {
        "slots": torch.arange(100, 100 + batch.num_tokens),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }
    return replace(batch, inputs={**batch.inputs, **more})


class Engine:
    """A manager that notes what each step looked like."""

    def __init__(self, kind: str = "plain", mode: str = "FULL_AND_PIECEWISE", **more: Any) -> None:
        check = more.pop("check", True)
        dispatch = more.pop("dispatch", None) or dispatcher(mode)
        self.steps: list[Any] = []
        self.agreement = Agreement(dispatch, check=check)
        self.manager = manager(
            kind=kind,
            dispatch=self.agreement,
            **{"inputs": (*INPUTS, SLOTS, LENGTHS), "metadata": self.metadata, **more},
        )
        self.model = getattr(self.manager.model, "_orig_mod", self.manager.model)

    def metadata(self, batch: Batch, descriptor: Any, buffers: dict[str, Any]) -> Metadata:
        names = ("slots", "seq_lens", "query_start_loc", "input_ids")
        rows = {name: buffers[name].tolist() for name in names if name in buffers}
        self.steps.append((batch.num_tokens, batch.max_query_len, rows))
        return Metadata(buffers["query_start_loc"])

    def step(self, lengths: tuple[int, ...], decode: bool) -> None:
        """One step that equals the one without padding and without graphs."""
        if not lengths:
            assert self.manager.run(None) is None
            return
        batch = staged(*lengths, decode=decode)
        plain = {n: v for n, v in batch.inputs.items() if n not in ("slots", "seq_lens")}
        expected = eager(self.model, replace(batch, inputs=plain))
        torch.testing.assert_close(self.manager.run(batch), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- uneven batches, idle ranks


def uneven(rank: int, ranks: int) -> Any:
    counted = []
    for kind in ("plain", "compiled"):
        # The hook reads the context in captured code, but no metadata, whose shape differs per step.
        engine = Engine(kind, checks="-metadata" if kind == "plain" else True)
        across: list[Any] = []
        if kind == "plain":  # traced code cannot read the context
            engine.model.register_forward_pre_hook(lambda *_, seen=across: seen.append(_across()))
        for bulk in engine.manager.capture().values():
            assert bulk.missing == ()
        assert all(seen[1].tolist() == [seen[0]] * ranks for seen in across)
        replays = engine.manager.counters.replays
        steps = []
        for batches, _ in STEPS:
            before = len(engine.steps)
            across.clear()
            engine.step(*batches[rank])
            plain = [seen[1].tolist() for seen in across if seen]
            steps.append((len(engine.steps) - before, engine.steps[-1], plain))
        counted.append((steps, engine.manager.counters.replays - replays))
    return counted


def _across() -> Any:
    """(padded tokens, those of all ranks) of the step that runs; None in one to compare with."""
    context = get_forward_context()
    if context.num_tokens_across_dp is None:
        return None
    return context.num_tokens, context.num_tokens_across_dp


@pytest.mark.slow
def test_every_rank_runs_what_was_agreed(tmp_path: Path) -> None:
    answers = run_ranks(uneven, 3, tmp_path)
    graphs = sum(1 for _, runs in STEPS if runs[0] and runs[0][0] != "NONE")
    for kind in range(2):
        for rank in range(3):
            steps, replays = answers[rank][kind]
            assert replays == graphs
            for (batches, runs), (ran, noted, plain) in zip(STEPS, steps, strict=True):
                if runs[rank] is None:
                    assert ran == 0
                    continue
                (lengths, _), (mode, padded) = batches[rank], runs[rank]
                tokens, _, rows = noted
                real = sum(lengths)
                assert (ran, tokens, len(rows["slots"])) == (1, real, padded)
                assert rows["slots"] == [*range(100, 100 + real), *[-1] * (padded - real)]
                if mode == "NONE" and kind == 0:
                    assert plain == [[size for _, size in runs]]
                if not lengths:
                    assert set(rows["query_start_loc"]) == {0}
                    assert set(rows["seq_lens"]) == {1}
                    assert set(rows["input_ids"]) == {0}


# ---------------------------------------------------------------- captures


class Picky(Decoder):
    """On one rank a batch of four tokens cannot be captured, or not even run."""

    def __init__(self, picky: bool, broken: bool = False) -> None:
        super().__init__()
        self.picky, self.broken = picky, broken

    def forward(self, input_ids, positions, inputs_embeds=None):
        hidden = super().forward(input_ids, positions)
        if not self.picky or input_ids.shape[0] != 4:
            return hidden
        if self.broken:
            raise ValueError("of one rank alone")
        return hidden * float(hidden.mean() * 0 + 1)  # reads the device


def refusing(rank: int, ranks: int) -> Any:
    engine = Engine(mode="FULL", model=Picky(rank == 1))
    (bulk,) = engine.manager.capture().values()
    missing = [(each.num_tokens, why.partition(":")[0]) for each, why in bulk.missing]
    for lengths in ((3,), (2, 1), (7,), (1,)):
        engine.step(lengths, MIXED)
    cells = engine.manager.statistics.cells()
    runs = {(cell.mode, cell.unpadded, cell.padded): cell.hits for cell in cells}
    engine = Engine(mode="FULL", model=Picky(rank == 1, broken=True))
    return missing, runs, caught(engine.manager.capture, (AgreementError, ValueError))


@pytest.mark.slow
def test_what_one_rank_cannot_capture_no_rank_has(tmp_path: Path) -> None:
    answers = run_ranks(refusing, 2, tmp_path)
    assert answers[0][0] == [(4, "rank 1 has not captured it")]
    assert answers[1][0] == [(4, "CaptureError")]
    for _, runs, _ in answers:
        # The next larger one serves what the missing one would have.
        assert runs == {("FULL", 3, 8): 2, ("FULL", 7, 8): 1, ("FULL", 1, 1): 1}
    gave_up = "AgreementError: rank 1 raised an exception in plan() or in a capture."
    assert [error for _, _, error in answers] == [gave_up, "ValueError: of one rank alone"]


def lazily(rank: int, ranks: int) -> Any:
    """An idle rank captures with the others, and the graph holds for real rows."""
    engine = Engine(mode="FULL", lazily=True)
    for _ in range(4):
        engine.step((1, 1) if rank == 0 else (), DECODE)
    for _ in range(2):
        engine.step((1,) if rank == 0 else (1, 1), DECODE)
    counters = engine.manager.counters
    return counters.captures, counters.replays


@pytest.mark.slow
def test_an_idle_rank_captures_lazily(tmp_path: Path) -> None:
    assert run_ranks(lazily, 2, tmp_path) == [(1, 4)] * 2


# ---------------------------------------------------------------- restrictions, variants


def restricted(rank: int, ranks: int) -> Any:
    axes = (Axis("kernel", ("a", "b")), Axis("bound", (8, 16), "pad_up"))
    dispatch = dispatcher("FULL_AND_PIECEWISE", axes=(*axes, LoraCases((1, 4))))
    agreement = Agreement(dispatch, check=True)
    rows = []

    def dispatch(kernel: str, bound: int, loras: int, **more: Any) -> None:
        agreed = agreement.dispatch(2, 2, 1, True, loras > 0, loras, (kernel, bound), **more)
        mode, descriptor, why = agreed.dispatched
        key = (descriptor.num_active_loras, descriptor.extra)
        rows.append((mode.name, *key, why and why.reason.value))

    dispatch("a", (5, 12)[rank], 0)
    dispatch("ab"[rank], 8, 0)
    dispatch("b", 8, (0, 3)[rank])
    dispatch("a", 8, (2, 9)[rank])
    dispatch("a", 8, 0, **({"valid_modes": (FULL,)} if rank else {"invalid_modes": (FULL,)}))
    dispatch("a", 8, 0, **({"valid_modes": (PIECEWISE, NONE)} if rank else {}))
    agreed = agreement.dispatch(0) if rank else agreement.dispatch(3, 3, 1, True, extra=("b", 9))
    rows.append((agreed.dispatched.mode.name, *agreed.dispatched.descriptor[4:]))
    if rank == 0:
        with pytest.raises(BatchError):  # before the others count on it
            agreement.dispatch(2, 2, 1, True, extra=("a",))
    agreement.dispatch(1, extra=("a", 8))
    with pytest.warns(FutureWarning), pytest.raises(AgreementError, match="another dispatcher"):
        manager(agreement=agreement)
    return rows


@pytest.mark.slow
def test_ranks_agree_on_variants_and_restrictions(tmp_path: Path) -> None:
    answers = run_ranks(restricted, 2, tmp_path)
    none = (0, ())
    for rank, steps in enumerate(answers):
        assert steps[0] == ("FULL", 0, ("a", 16), None)
        assert steps[1] == ("NONE", *none, "other_rank")
        assert steps[2] == ("FULL", 4, ("b", 8), None)
        assert steps[3] == ("NONE", *none, ("other_rank", "unlisted_variant")[rank])
        assert steps[4] == ("NONE", *none, "other_rank")
        assert steps[5] == ("PIECEWISE", 0, ("a", 8), ("other_rank", "mode_excluded")[rank])
        assert (steps[6][0], steps[6][-1]) == ("FULL", ("b", 16))


class Baking(Decoder):
    """On one rank a number of the host ends up in the graph."""

    def __init__(self, bakes: bool) -> None:
        super().__init__()
        self.bakes = bakes

    def forward(self, input_ids, positions, inputs_embeds=None):
        hidden = super().forward(input_ids, positions)
        return hidden * (get_forward_context().num_unpadded_tokens if self.bakes else 1)


def verifying(rank: int, ranks: int) -> Any:
    graph_manager = Engine(mode="FULL_AND_PIECEWISE", model=Baking(rank == 1)).manager
    graph_manager.capture()
    batches = [staged(*[1] * count, decode=True) for count in (2, 3)]
    verdict = verify(graph_manager, *batches, rtol=1e-5, atol=1e-5)
    if graph_manager.agreement.largest(len(verdict.differences)):
        for mode, descriptor in graph_manager.dispatcher.plan():
            if mode is FULL:
                graph_manager.dispatcher.refused(mode, descriptor, "it differs from eager")
    graph_manager.run(batches[0])
    return len(verdict.differences), graph_manager.dispatched(batches[0]).mode.name


@pytest.mark.slow
def test_full_graphs_that_do_not_hold_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    assert run_ranks(verifying, 2, tmp_path) == [(0, "PIECEWISE"), (1, "PIECEWISE")]


# ---------------------------------------------------------------- ranks that differ or stay away


def own_way(rank: int, ranks: int) -> Any:
    """One rank is without a graph, one replays another size; what each of all was told."""
    engine = Engine(mode="FULL")
    graph_manager = engine.manager
    graph_manager.capture()
    if rank == 1:
        graph_manager.dispatcher.refused(FULL, BatchDescriptor(4, 4), "by this rank alone")
    lengths = (1,) if rank == 1 else (3,)
    errors = [caught(lambda: graph_manager.run(staged(*lengths, decode=False)))]
    errors.append(caught(lambda: graph_manager.run_fullgraph(8 if rank == 1 else 16)))
    alone = (
        (lambda: graph_manager.run_fullgraph(8)) if rank == 1 else (lambda: graph_manager.run(None))
    )
    errors.append(caught(alone))
    engine.step((7,), MIXED)
    graph_manager.run_fullgraph(8)
    return [error.removeprefix("AgreementError: ") for error in errors]


@pytest.mark.slow
def test_a_rank_that_goes_its_own_way_is_named(tmp_path: Path) -> None:
    answers = run_ranks(own_way, 3, tmp_path)
    assert answers[0] == [
        "rank 1 is about to run FULL, 8 tokens; rank 0 FULL, 4 tokens.",
        "rank 1 is about to run FULL, 8 tokens; rank 0 FULL, 16 tokens.",
        "rank 1 is about to run a graph of its own choice; rank 0 requests the graph of a step.",
    ]
    assert answers == [answers[0]] * 3


def staying_away(rank: int, ranks: int, *, dies: bool) -> Any:
    engine = Engine(mode="FULL", check=False)
    engine.manager.capture_graph(FULL, BatchDescriptor(4, 4))
    engine.step((3,), MIXED)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if not dies:  # it has work of its own
            store.wait(["done 0", "done 2"], datetime.timedelta(seconds=PATIENCE))
        os._exit(0)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=10), dist.group.WORLD)
    store.set(f"there {rank}", "")
    store.wait(["there 0", "there 2"], datetime.timedelta(seconds=PATIENCE))
    error = caught(lambda: engine.manager.run(staged(3, decode=False)))
    store.set(f"done {rank}", "")
    return error


def dying(rank: int, ranks: int) -> Any:
    return staying_away(rank, ranks, dies=True)


def busy(rank: int, ranks: int) -> Any:
    return staying_away(rank, ranks, dies=False)


@pytest.mark.slow
@pytest.mark.parametrize("work", [dying, busy])
def test_a_rank_that_stays_away_is_named(work: Any, tmp_path: Path) -> None:
    answers = run_ranks(work, 3, tmp_path)
    assert answers[1] is None
    for rank in (0, 2):
        start = f"AgreementError: rank {rank} requests the graph of a step (step 2), and waited for all ranks in vain"
        assert answers[rank].startswith(f"{start}; not there: rank 1.")


def test_without_work_and_without_other_ranks() -> None:
    graph_manager = manager("FULL")
    assert graph_manager.run(None) is None
    assert graph_manager.counters.calls == 0
    with pytest.raises(ManagerError):
        graph_manager.run_fullgraph(4)
