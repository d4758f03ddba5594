"""Each kind of row of a contract is needed: without it a row of ``table.py`` is stale."""

import importlib
from typing import Any

import pytest
from hazards.table import TABLE, library
from lib.hazards import RIGHT, STALE, observe

from cgcompile.graphs import state
from cgcompile.graphs.contract import Reads

ROWS = {row.name: row for row in TABLE}
INSIDE = "tensor inside of an argument is another argument no more"


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
        ("value", "number argument"),
        ("value", "flag of an argument"),
        ("tensor", "tensors inside of a tensor in an argument's field"),
        ("wrapper", INSIDE),
        ("identity", "another function in metadata"),
    ],
)
def test_rows_of_the_forward_context_and_of_arguments(
    kind: str, row: str, monkeypatch: Any
) -> None:
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
        ("_entries", "buffer added to a layer of torch"),
        ("_methods", "attribute of the class added"),
        ("_attributes", "attribute in place of a weight"),
    ],
)
def test_rows_of_the_state_of_a_model(part: str, row: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(state._Reader, part, lambda *_, **__: None)
    assert observe(ROWS[row], "CUDAGraphWrapper", "cpu") == STALE


SCALAR = "0-dim tensor of the CPU as an argument"
WRAPPER, TRACED, REPLAYED = "CUDAGraphWrapper", "none", "none, context"
GRAPHS, RUNTIME = "cgcompile.graphs", "cgcompile.runtime"
MEMORY = "cgcompile.torch_compat.raw_memory"
SETTINGS, FITS = "cgcompile.torch_compat.torch_settings", "cgcompile.tracing.argument_guards:Fits"


@pytest.mark.parametrize(
    ("check", "result", "front_end", "row"),
    [
        (f"{SETTINGS}:kernel_settings", (), WRAPPER, "sdpa_kernel"),
        (f"{SETTINGS}:kernel_settings", (), WRAPPER, "cuDNN flags"),
        (f"{SETTINGS}:trace_settings", (), WRAPPER, "default dtype"),
        (f"{SETTINGS}:trace_settings", (), WRAPPER, "autocast"),
        (f"{GRAPHS}.guards:Weights.same_objects", True, WRAPPER, "weight replaced"),
        (f"{GRAPHS}.guards:Weights.same_objects", True, WRAPPER, "layer replaced"),
        (f"{GRAPHS}.guards:Weights.same_objects", True, WRAPPER, "buffer replaced"),
        (f"{GRAPHS}.guards:Weights.same_objects", True, WRAPPER, "tensor attribute replaced"),
        (f"{GRAPHS}.contract:Read.change", None, WRAPPER, "weight replaced"),
        (f"{GRAPHS}.guards:Tensors.first_change", None, WRAPPER, "weight.data assigned"),
        (f"{GRAPHS}.guards:Tensors.first_change", None, WRAPPER, "weight transposed"),
        (f"{GRAPHS}.guards:Tensors.hold", True, WRAPPER, "weight.data assigned"),
        (f"{GRAPHS}.guards:Tensors.hold", True, WRAPPER, "weight of another shape"),
        (f"{GRAPHS}.contract:Layouts.hold", True, WRAPPER, "weight transposed"),
        (f"{GRAPHS}.contract:Layouts.hold", True, WRAPPER, "tensor of a list, other strides"),
        (f"{GRAPHS}.state:Owner.change", None, WRAPPER, "another dict of attributes of a layer"),
        (f"{GRAPHS}.contract:Reads.form", [], WRAPPER, "longer list as an argument"),
        (f"{MEMORY}:Addresses.hold_for", lambda: True, WRAPPER, "weight.data assigned"),
        (f"{GRAPHS}.capture:SameStorages.check", None, WRAPPER, ".data assigned in the step"),
        (f"{GRAPHS}.sequence:GraphSequence.check_held", None, WRAPPER, "tensor by a computed name"),
        (f"{FITS}._compare_settings", None, TRACED, "default dtype"),
        (f"{FITS}._compare_settings", None, TRACED, "autocast"),
        (f"{FITS}._container", None, TRACED, "number in a dict argument"),
        (f"{FITS}._inside", None, TRACED, INSIDE),
        (
            f"{GRAPHS}.contract:Reads.address",
            None,
            "keep, context",
            "tensor of an argument replaced",
        ),
        (f"{GRAPHS}.contract:Reads.address", None, REPLAYED, "tensor of an argument replaced"),
        (f"{RUNTIME}.recording:Recording.check", None, REPLAYED, "metadata nested five deep"),
        (f"{MEMORY}:Addresses.hold", True, "keep, context", "weight.data assigned"),
        (f"{RUNTIME}.fast_path:_CallLines.called", None, REPLAYED, "hook of the model added"),
        (f"{RUNTIME}.fast_path:_CallLines.called", None, REPLAYED, "forward replaced"),
        (f"{RUNTIME}.fast_path:_CallLines._moved", [], REPLAYED, SCALAR),
    ],
)
def test_checks_around_a_replay(
    check: str, result: Any, front_end: str, row: str, monkeypatch: Any
) -> None:
    """Without a check the cell of the table is another one: stale, or a later error."""
    path, _, name = check.partition(":")
    owner = importlib.import_module(path)
    *inside, name = name.split(".")
    for part in inside:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, lambda *_: result)
    seen = observe(ROWS[row], front_end, "cpu")
    assert seen != RIGHT
    assert seen != ROWS[row].outcome(front_end, "cpu")
