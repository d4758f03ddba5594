"""Every case against eager, at three batch sizes including 1, with each compiler of pieces."""

import pytest
from lib.asserts import check_against_eager, check_each_against_eager
from lib.cases import CASES

# C++ compilation of each piece takes seconds, so Inductor gets the cases in which a compiler is
# most likely to disagree; the GPU suite runs it over all of them.
INDUCTOR = [
    "op_packet",
    "size_crosses",
    "items_cross",
    "view_mutated_in_another_piece",
    "base_mutated_view_read",
    "base_mutated_by_boundary",
    "input_mutated_in_pieces",
    "autocast",
    "nonzero",
    "flex_attention",
    "decoder",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    """Also without FULL graphs, so that every boundary runs between graphs."""
    modes = [{}, {"cudagraph_mode": "PIECEWISE"}]
    for backend in check_each_against_eager(CASES[name], "eager", modes):
        assert backend.graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_eager_with_aot(name: str) -> None:
    backend = check_against_eager(CASES[name], "aot")
    assert backend.graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_equals_eager_with_inductor(name: str) -> None:
    backend = check_against_eager(CASES[name], "inductor")
    assert any(piece.compiled for graph in backend.graphs for piece in graph.split.pieces)
