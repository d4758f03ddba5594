"""The printed split of every case, in ``tests/data/splits``: what was cut where, and why."""

import pytest
import torch
from lib.asserts import backend_for, build, split_texts
from lib.cases import CASES
from lib.snapshots import assert_snapshot


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_split_of(name: str) -> None:
    assert_snapshot(f"splits/{name}", split_texts(CASES[name]))


@pytest.mark.slow
def test_a_graph_break_is_reported_with_its_cause_and_line() -> None:
    case = CASES["nonzero_graph_break"]
    backend = backend_for(case, "eager")
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        torch.compile(build(case), backend=backend)(*case.inputs(6))
    breaks = [graph.split.graph_break for graph in backend.graphs]
    assert breaks[-1] is None
    assert any("cases.py:" in each for each in breaks if each)
    assert any(each in str(backend.graphs[0].split) for each in breaks if each)
