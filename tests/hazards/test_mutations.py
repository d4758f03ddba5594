"""Each kind of row of a contract is needed: without it a row of ``table.py`` is stale."""

from typing import Any

import pytest
from hazards.table import TABLE, library
from lib.hazards import STALE, observe

from cgcompile.graphs import state
from cgcompile.graphs.contract import Reads

ROWS = {row.name: row for row in TABLE}


@pytest.fixture(autouse=True, scope="module")
def ops() -> None:
    library()


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("tensor", "metadata nested five deep"),
        ("tensor", "shape of metadata at one address"),
        ("value", "number in metadata"),
        ("members", "metadata in a set"),
        ("wrapper", "tensors inside of a tensor in metadata"),
    ],
)
def test_rows_of_the_forward_context(kind: str, row: str, monkeypatch: Any) -> None:
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") == ROWS[row].outcome(
        "CUDAGraphWrapper", "cpu"
    )
    monkeypatch.setattr(Reads, kind, lambda *_: None)
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") == STALE


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("tensor", "tensor in nested arguments replaced"),
        ("value", "number in a dict argument"),
        ("value", "flag of an argument"),
        ("form", "longer list as an argument"),
    ],
)
def test_rows_of_the_arguments(kind: str, row: str, monkeypatch: Any) -> None:
    expected = ROWS[row].outcome("CUDAGraphWrapper", "cpu")
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") == expected
    monkeypatch.setattr(Reads, kind, lambda *_: [])
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") != expected


@pytest.mark.parametrize(
    ("part", "row"),
    [
        ("_place", "float attribute"),
        ("_place", "closure cell"),
        ("_place", "tensor of a dict, old one alive"),
        ("_place", "forward of the class replaced"),
        ("_attributes", "field of a helper object"),
        ("_container", "item of a dict"),
        ("_container", "item of a list"),
        ("_container", "tensor of a deque, old one alive"),
        ("_module", "hook added"),
        ("_module", "forward of a layer replaced"),
        ("_module", "training mode"),
    ],
)
def test_rows_of_the_state_of_a_model(part: str, row: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(state._Reader, part, lambda *_: None)
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") == STALE
