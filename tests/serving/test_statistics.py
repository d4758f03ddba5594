"""What was dispatched, counted."""

import json
import threading

from expecttest import assert_expected_inline
from lib.oracles import Batch, Mode, decode, dispatcher
from lib.snapshots import assert_snapshot

from cgcompile.reasons import Reason
from cgcompile.serving.statistics import Cell, DispatchStatistics


def recorded(result, batches, **settings) -> DispatchStatistics:
    statistics = DispatchStatistics(result.plan(), **settings)
    for batch in batches:
        statistics.record(batch.num_tokens, batch.through(result))
    return statistics


MANY = [decode(1)] * 4 + [decode(5)] * 3 + [decode(3, 3), decode(2, 2), decode(9)]
MANY += [Batch(7, 3, 4), Batch(11, 3, 9), Batch(40, 2, 39), Batch(30, 2, 29), Batch(0)]


def test_coverage() -> None:
    dispatch = dispatcher(sizes=[1, 2, 4, 8, 16], query_lens=(1, 3))
    dispatch.refused(Mode.FULL, decode(1).through(dispatch).descriptor, "an op reads the host")
    assert_snapshot("dispatch/coverage", recorded(dispatch, MANY).coverage())


def test_coverage_of_variants_and_of_nothing() -> None:
    dispatch = dispatcher(Mode.FULL, [4, 8], max_num_reqs=6, varlen_decode_sizes={2: [8]})
    assert_expected_inline(
        DispatchStatistics(dispatch.plan()).coverage(),
        """\
batches      mode  graph                     padding  hits  reason
1..4 tokens  FULL  num_tokens=4, num_reqs=4  -        0
5..8 tokens  FULL  num_tokens=8, num_reqs=6  -        0
0 steps, 0.0% of their rows padding""",
    )
    assert_expected_inline(
        DispatchStatistics().coverage(),
        """\
batches  mode  graph  padding  hits  reason
0 steps, 0.0% of their rows padding""",
    )


def test_plain_data() -> None:
    statistics = recorded(dispatcher(sizes=[8]), [decode(5), decode(5), Batch(7), Batch(9)])
    data = json.loads(json.dumps(statistics.as_dict()))
    assert data["modes"] == {"FULL": 2, "PIECEWISE": 1, "NONE": 1}
    assert (data["steps"], data["real_tokens"], data["padded_tokens"]) == (4, 26, 33)
    assert data["padding_share"] == statistics.padding_share == 1 - 26 / 33
    assert data["reasons"] == [
        {
            "mode": "NONE",
            "reason": "oversize",
            "hits": 1,
            "least_tokens": 9,
            "most_tokens": 9,
            "detail": "more than 8 tokens: no graph is as large",
        }
    ]
    assert statistics.cells() == [Cell(5, 8, "FULL", 2), Cell(7, 8, "PIECEWISE", 1), Cell(9, 9, "NONE", 1)]  # fmt: skip
    assert [Cell(**cell) for cell in data["cells"]] == statistics.cells()
    statistics.clear()
    assert statistics.steps == 0
    assert statistics.reasons() == {}
    assert statistics.padding_share == 0.0


def test_memory_is_bounded_and_totals_stay_exact() -> None:
    dispatch = dispatcher(sizes=[8])
    batches = [Batch(n) for n in range(1, 1001)] * 2
    statistics = recorded(dispatch, batches, max_sizes=10)
    assert statistics.steps == 2000
    assert statistics.reasons() == {Reason.OVERSIZE: 1984}
    cells = statistics.cells()
    assert len(cells) == 11
    assert cells[0] == Cell(None, None, "NONE", 1980)
    assert sum(cell.hits for cell in cells) == 2000
    assert statistics.as_dict()["real_tokens"] == 1_001_000
    assert statistics.as_dict()["padded_tokens"] == 1_001_000 + 2 * sum(8 - n for n in range(1, 9))


def test_threads_lose_nothing() -> None:
    dispatch = dispatcher()
    statistics = DispatchStatistics(dispatch.plan())

    def serve() -> None:
        for n in range(1, 501):
            statistics.record(n % 20 + 1, dispatch.dispatch(n % 20 + 1))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statistics.steps == 2000
    assert sum(cell.hits for cell in statistics.cells()) == 2000
    assert statistics.reasons() == {Reason.OVERSIZE: 400}
