"""Which Python state of a model a replay compares; the changes themselves are in ``table.py``."""

import collections
import functools
import gc
import importlib
import pathlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hazards.table import HELPERS
from lib.front_ends import (
    ROWS,
    WIDTH,
    WRAPPERS,
    assert_steps_equal_eager,
    context,
    front_end,
    settings,
)
from torch import nn

import cgcompile
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs import state
from cgcompile.graphs.capture import capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.state import RanCode, names_loaded
from cgcompile.testing.host import HostDevice
from cgcompile.torch_compat import raw_memory

SETTING = 1.0


class Scaled(nn.Module):
    """Multiplies by ``scale``; ``other`` is not read."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.requires_grad_(False)
        self.scale, self.other, self.table = 2.0, 1, {"k": 1.0}
        self.log = types.SimpleNamespace(calls=0, seen=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.calls += 1
        self.log.seen.append(self.log.calls)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * self.table["k"]


def replays(served: Any, model: Any, steps: int = 3) -> None:
    """Compare steps with eager; each must be a replay."""
    assert_steps_equal_eager(served, model, schedule=[ROWS] * steps, replays=steps)


def captured(name: str, model: Any, **settings: Any) -> Any:
    served = front_end(name, model, "cpu", **settings)
    with torch.inference_mode():
        served.step(torch.randn(ROWS, WIDTH))
    return served


def refused(served: Any, match: str, error: Any = HostValueChangedError) -> None:
    with torch.inference_mode(), pytest.raises(error, match=match):
        served.step(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("layers", [1, 80], ids=["values", "versions"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_code_reads_is_compared_and_nothing_else(name: str, layers: int) -> None:
    model = Scaled(layers)
    served = captured(name, model)
    replays(served, model)  # what the step itself changes is bookkeeping
    model.other = 7  # named by no code that the step runs
    model.table["new"] = 3.0
    model.log.later = 1
    replays(served, model)
    model.scale = float("2")  # an equal value
    model.table = dict(model.table)
    replays(served, model)
    model.scale = 3.0
    refused(served, r"self\.scale is 3\.0, was 2\.0 .*(?s:.)*checks='-state'")
    model.scale = 2.0
    replays(served, model)
    model.table["k"] = -1.0
    refused(served, r"self\.table\['k'\] is -1\.0, was 1\.0")
    model.table["k"] = 1.0
    model.layers[-1].register_forward_hook(lambda *_: None)
    refused(served, "number of hooks of self.layers.")


@pytest.mark.parametrize("layers", [1, 80], ids=["values", "versions"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_dropped_model_is_freed_at_once(name: str, layers: int) -> None:
    model = Scaled(layers)
    served = captured(name, model)
    replays(served, model)
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, served
        assert reference() is None  # without a collection: no cycle holds it, nor its graphs
    finally:
        gc.enable()


@pytest.mark.parametrize("name", [*WRAPPERS, "CudaGraphManager"])
def test_a_refused_step_keeps_no_replaced_weight(name: str) -> None:
    """The error refers to the frames of the call, and no frame to the error."""
    model = Scaled()
    served = captured(name, model)
    gc.collect()
    gc.disable()
    try:
        replaced = weakref.ref(model.layers[0].weight)
        model.layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        refuses = False
        try:
            with torch.inference_mode():
                served.step(torch.randn(ROWS, WIDTH))
        except AddressChangedError:
            refuses = True
        assert refuses
        assert replaced() is not None  # the graph reads it
        (served.target.release if name == "CudaGraphManager" else served.target.clear_graphs)()
        assert replaced() is None
    finally:
        gc.enable()


RUNS: dict[str, int] = {}
ALSO = {"runs": RUNS}
SPACE = globals()


def count() -> None:
    RUNS["step"] = RUNS.get("step", 0) + 1


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("other", [lambda: ALSO["runs"], lambda: SPACE["RUNS"]], ids=["dict", "G"])
def test_what_the_step_changes_is_bookkeeping_under_each_name(name: str, other: Any) -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other()  # code that has run before
            count()
            return x * 2

    RUNS.clear()
    model = Counts()
    served = captured(name, model)
    for _ in range(3):
        RUNS.clear()
        replays(served, model, steps=1)
    RUNS["step"] = 7
    replays(served, model)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_globals_of_a_module_as_a_dict(name: str) -> None:
    """Names that code loads are compared, as of the module itself, and no others."""
    model = Scaled()
    model.scale = lambda: SPACE["SETTING"]
    model.forward = lambda x: x * model.scale()
    served = captured(name, model)
    replays(served, model)
    try:
        SPACE["of another model"] = 1
        replays(served, model)
        SPACE["SETTING"] = 3.0
        refused(served, r"SETTING is 3\.0, was 1\.0")
    finally:
        SPACE["SETTING"] = 1.0
        del SPACE["of another model"]
    replays(served, model)


class Optional(nn.Module):
    """Reads tensors that it may not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.late if hasattr(self, "late") else x


class Layers(nn.Sequential):
    """A subclass of a container of torch."""


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([torch.ones(WIDTH)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.items)


ADDED: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    "attribute": lambda: (m := Optional(), lambda: setattr(m, "late", torch.zeros(WIDTH))),
    "buffer": lambda: (m := Optional(), lambda: m.register_buffer("late", torch.zeros(WIDTH))),
    "layer of a subclass": lambda: (m := Layers(nn.Tanh()), lambda: m.append(nn.ReLU())),
    "parameter of a list": lambda: (m := Sums(), lambda: m.items.append(torch.ones(WIDTH))),
}


@pytest.mark.parametrize("front", [*WRAPPERS, "CudaGraphManager"])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_model_and_read(name: str, front: str) -> None:
    model, add = ADDED[name]()
    served = captured(front, model)
    model.register_buffer("unused", torch.zeros(1))
    replays(served, model)
    add()
    refused(served, "missing when captured")


def test_negative_zero_and_other_types_differ() -> None:
    model = Scaled()
    model.scale = 0.0
    served = captured("CUDAGraphWrapper", model)
    for value in (-0.0, 0, False):
        model.scale = value
        refused(served, "self.scale is")
    model.scale = 0.0
    replays(served, model)


def test_without_the_setting_the_values_of_the_capture_are_repeated() -> None:
    model = Scaled()
    served = captured("CUDAGraphWrapper", model, checks="-state")
    replays(served, model)
    model.scale = 3.0
    with torch.inference_mode():
        x = torch.randn(ROWS, WIDTH)
        torch.testing.assert_close(served.step(x), model.layers[0](x) * 2.0)


@pytest.mark.parametrize(("chosen", "captures"), [("recapture", 2), ("eager", 1)])
def test_on_input_change_is_followed(chosen: str, captures: int) -> None:
    model = Scaled()
    served = captured("CUDAGraphWrapper", model, on_input_change=chosen)
    for scale in (2.0, 3.0, 2.0, 3.0):
        model.scale = scale
        with torch.inference_mode():
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(served.step(x), model(x))
    assert served.counters().captures == captures


class Engine:
    """An engine whose state changes at each step, around a method that is captured."""

    def __init__(self) -> None:
        self.model = Scaled()
        self.requests: list[int] = []
        self.logits = torch.zeros(1)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) / self.temperature

    def step(self, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        self.requests.append(len(self.requests))
        self.logits = run(x).clone()
        return self.logits


@pytest.mark.parametrize("name", WRAPPERS)
def test_state_of_an_engine_that_its_method_does_not_read(name: str) -> None:
    engine = Engine()
    served = captured(name, engine.forward)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(engine.step(served.step, x), engine.forward(x))
    assert (served.counters().captures, served.counters().replays) == (1, 4)
    engine.temperature = 3.0
    refused(served, r"self\.temperature is 3\.0")


def times_setting(x: torch.Tensor) -> torch.Tensor:
    return x * SETTING


@pytest.mark.parametrize("first", ["another capture", "another thread"])
def test_code_that_ran_elsewhere_first_is_noted(first: str, monkeypatch: Any) -> None:
    def in_a_thread(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=times_setting, args=(torch.ones(1),))
        thread.start()
        thread.join()
        return times_setting(x) + 1

    step = in_a_thread if first == "another thread" else (lambda x: times_setting(x) + 1)
    if first == "another capture":
        captured("CUDAGraphWrapper", times_setting)
    served = captured("CUDAGraphWrapper", step)
    replays(served, step)
    monkeypatch.setitem(globals(), "SETTING", 3.0)
    refused(served, "global SETTING is 3.0, was 1.0")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no function is called for each call")
def test_code_of_the_recorder_is_not_traced() -> None:
    ran = RanCode()

    def step(x: torch.Tensor) -> torch.Tensor:
        with ran:
            return times_setting(times_setting(x))

    x = torch.ones(ROWS)
    graph, result = capture(functools.partial(step, x), GraphPool(HostDevice()), "step")
    x.fill_(4.0)
    graph.replay()
    torch.testing.assert_close(result, times_setting(times_setting(x)))
    noted = [scope["__name__"] for scope in ran.codes.values()]
    assert times_setting.__code__ in ran.codes
    assert noted.count("cgcompile.testing.host") <= 2  # what turns the trace off


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["before the capture", "in the step"])
def test_the_trace_function_of_a_debugger_stays(inside: bool) -> None:
    traced = []

    def trace(frame: types.FrameType, event: str, argument: Any) -> None:
        traced.append(frame.f_code.co_name)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        if inside and traced == ["begin"]:
            sys.settrace(trace)
        return doubled(x)

    before, x = sys.gettrace(), torch.randn(ROWS, WIDTH)
    traced.append("begin")
    try:
        if not inside:
            sys.settrace(trace)
        captured("CUDAGraphWrapper", step)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert "doubled" in traced
    torch.testing.assert_close(step(x), x * 2)


def test_an_eager_break_reads_state_anew() -> None:
    holder = types.SimpleNamespace(factor=2.0)

    @cgcompile.eager_break_during_capture
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * holder.factor

    wrapper = cgcompile.BreakableCUDAGraphWrapper(
        lambda x: scaled(x + 1) - 1, cgcompile.CompilationConfig(capture_device="host")
    )
    batch = cgcompile.BatchDescriptor(ROWS)
    x = torch.empty(ROWS, WIDTH)
    for factor in (2.0, 2.0, 3.0, 4.0):
        holder.factor = factor
        context = cgcompile.set_forward_context(
            cudagraph_runtime_mode="PIECEWISE", batch_descriptor=batch
        )
        with torch.inference_mode(), context:
            result = wrapper(x.normal_())
        torch.testing.assert_close(result, (x + 1) * factor - 1)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 3)


def test_a_tensor_in_a_helper_that_is_moved_in_place() -> None:
    model = Scaled()
    model.table["k"] = torch.full((WIDTH,), 2.0)
    served = captured("CUDAGraphWrapper", model)
    replays(served, model)
    model.table["k"].copy_(torch.rand(WIDTH))
    replays(served, model)
    model.table["k"].data = torch.rand(WIDTH)
    refused(served, r"the tensor self\.table\['k'\] is at", AddressChangedError)


def test_functions_below_decorators_and_properties_are_followed() -> None:
    class Decorated(nn.Module):
        @property
        def doubled(self) -> float:
            return self.number * 2

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(x) * self.doubled

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * factor * SETTING

    factor = 1.0
    model = Decorated()
    model.number = 1.0
    served = captured("CUDAGraphWrapper", model)
    replays(served, model)
    model.number = 2.0
    refused(served, "self.number is 2.0")
    model.number, factor = 1.0, 2.0
    refused(served, "closure factor is 2.0")


@pytest.mark.parametrize("name", WRAPPERS)
def test_code_that_an_import_runs_is_not_of_the_step(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_name = f"imported_by_{name.lower()}"
    text = "knobs = {'k': 2.0}\ndef read():\n    return knobs['k']\nfactor = read()\n"
    (tmp_path / f"{module_name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    class Imports(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * importlib.import_module(module_name).factor

    served = captured(name, Imports())
    sys.modules[module_name].knobs["k"] = 3.0
    replays(served, Imports())


def test_a_write_to_one_of_many_dicts_is_noticed() -> None:
    class Base:
        number = 1

    class Derived(Base):
        pass

    plain = [{"k": index} for index in range(100)]
    dicts = (*plain, *raw_memory.dicts_of_class(Derived))
    both, few = raw_memory.DictVersions(dicts), raw_memory.DictVersions(tuple(plain[:50]))
    for _ in range(3):
        {}["k"] = 1
        assert both.hold()
        assert few.hold()
    Base.number = 2
    assert not both.hold()
    assert not both.hold()
    assert few.hold()
    plain[7].pop("k")
    assert not few.hold()
    assert few.changed() == [plain[7]]
    assert len(both.changed()) == 2
    with pytest.raises(TypeError):
        int.number = 1  # type: ignore[attr-defined]
    assert raw_memory.dicts_of_class(bool) == []


def test_an_update_of_an_empty_dict_is_noticed() -> None:
    dicts: tuple[dict[str, int], ...] = ({"k": 1}, {}, {})
    versions = raw_memory.DictVersions(dicts)
    assert versions.hold()
    dicts[2].update({"k": 2})  # CPython 3.12 copies the other dict
    assert not versions.hold()
    assert not versions.hold()
    assert versions.changed() == [dicts[2]]


@pytest.mark.parametrize("name", WRAPPERS)
def test_objects_that_a_model_has_no_more_are_freed(name: str) -> None:
    class Part:
        def __init__(self) -> None:
            self.factor, self.rest = 2.0, torch.zeros(1)

    class Holds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.part.factor

    model, parts = Holds(), list[weakref.ref[Part]]()
    model.part = Part()
    served = captured(name, model)
    for _ in range(8):
        model.part = Part()
        parts.append(weakref.ref(model.part.rest))
        replays(served, model, 1)
    gc.collect()
    assert sum(part() is not None for part in parts) <= 2  # of the capture, and the present one
    model.part.factor = 3.0
    refused(served, "self.part.factor is 3.0")


class Defaults:
    factor = 2.0

    def __init__(self) -> None:
        self.unused = 0


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_attribute_in_place_of_another_hides_that_of_the_class(name: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Defaults()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.part.factor

    model = Reads()
    served = captured(name, model)
    replays(served, model)
    del model.part.unused
    model.part.other = 0
    replays(served, model)
    del model.part.other
    model.part.factor = 3.0
    refused(served, r"self\.part\.factor is 3\.0, was missing")
    del model.part.factor
    replays(served, model)


class Parts(nn.Module):
    """Reads ``factor`` of what it holds in several kinds of places."""

    shared: ClassVar[dict[str, float]] = {"factor": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.table, self.items, self.pair = (
            {"factor": 1.0},
            [{"factor": 1.0}],
            (self.another_part(1.0), 1),
        )
        self.part = self.another_part(1.0)
        variable = {"factor": 1.0}

        def read() -> float:
            return variable["factor"]

        def write(value: dict[str, float]) -> None:
            nonlocal variable
            variable = value

        self.read, self.write = read, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.table["factor"] * self.items[0]["factor"] * self.pair[0].factor
        x = x * self.part.factor * self.part.owner.table["factor"] * self.read()
        return x * self.shared["factor"] * self.part.scale * FACTORS["factor"]

    def another_part(self, factor: float) -> types.SimpleNamespace:
        return types.SimpleNamespace(owner=self, factor=factor, scale=SCALE)


FACTORS, SCALE = {"factor": 1.0}, torch.ones(WIDTH)


REPLACED: dict[str, tuple[str, Callable[[Parts, float], None]]] = {
    "dict": ("self.table", lambda model, k: setattr(model, "table", {"factor": k})),
    "list": ("self.items[0]", lambda model, k: setattr(model, "items", [{"factor": k}])),
    "item": ("self.items[0]", lambda model, k: model.items.__setitem__(0, {"factor": k})),
    "tuple": ("self.pair[0]", lambda model, k: setattr(model, "pair", (model.another_part(k), 1))),
    "object": ("self.part", lambda model, k: setattr(model, "part", model.another_part(k))),
    "variable": ("self.read closure variable", lambda model, k: model.write({"factor": k})),
    "class": ("Parts.shared", lambda model, k: setattr(Parts, "shared", {"factor": k})),
    "global": ("global FACTORS", lambda _, k: globals().__setitem__("FACTORS", {"factor": k})),
}


@pytest.mark.parametrize("settled", [2, 1000])
@pytest.mark.parametrize("kind", [*REPLACED])
@pytest.mark.parametrize("name", WRAPPERS)
def test_equal_objects_in_place_of_others(
    name: str, kind: str, settled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the replaced object holds is read again; another value in it is an error."""
    monkeypatch.setattr(state, "_SETTLED", settled)
    monkeypatch.setattr(Parts, "shared", {"factor": 1.0})
    monkeypatch.setitem(globals(), "FACTORS", {"factor": 1.0})
    path, replace = REPLACED[kind]
    model = Parts()
    served = captured(name, model)
    for _ in range(2):  # the second time after other steps
        replace(model, 1.0)
        replays(served, model, 1)
        with monkeypatch.context() as patched:
            patched.setattr(state, "read_state", None)
            for _ in range(4):
                replace(model, 1.0)
                replays(served, model, 1)
        replace(model, 3.0)
        refused(served, rf"{re.escape(path)}.*factor'?\]? is 3\.0, was (1\.0|missing)")
        replace(model, 1.0)
        replays(served, model, 5)


@pytest.mark.parametrize("with_steps", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_added_unread_and_removed_again(name: str, with_steps: bool) -> None:
    model = Scaled()
    served = captured(name, model)
    added: dict[str, Any] = {
        "unread_layer": nn.Sequential(nn.Linear(3, 3)),
        "unread_weight": nn.Parameter(torch.ones(2), requires_grad=False),
        "unread_part": types.SimpleNamespace(factor=1.0),
    }
    for key, value in added.items():
        setattr(model, key, value)
        replays(served, model, 2 * with_steps)
        delattr(model, key)
        replays(served, model, 2)
    del model.layers
    refused(served, "layers", AddressChangedError)


@pytest.mark.parametrize("name", WRAPPERS)
def test_another_class_and_dict_of_a_helper_object(name: str) -> None:
    class Other(Defaults):
        factor = 3.0

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Defaults()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.part.factor

    model = Reads()
    served = captured(name, model)
    for _ in range(2):
        model.part.__dict__ = dict(vars(model.part))  # an equal one
        replays(served, model)
    before, model.part.__dict__ = model.part.__dict__, {"factor": 3.0}
    refused(served, r"self\.part\.factor is 3\.0, was missing")
    model.part.__dict__ = before
    replays(served, model)
    model.part.factor = 3.0
    refused(served, r"self\.part\.factor is 3\.0, was missing")
    del model.part.factor
    replays(served, model)
    model.part.__class__ = Other
    refused(served, r"self\.part\.__class__ is \S+Other, was Defaults")
    model.part.__class__ = Defaults
    replays(served, model)


@pytest.mark.parametrize("name", [*WRAPPERS, "CudaGraphManager"])
def test_an_equal_dict_of_attributes_of_a_module(name: str) -> None:
    """Its tables and tensors are compared from then on, and those of the first dict no more."""
    model = Scaled()
    layer, model.shift = model.layers[0], torch.ones(WIDTH)
    model.forward = lambda x: layer(x) * model.scale + model.shift
    served = captured(name, model)
    firsts = [(module, module.__dict__) for module in (model, layer)]
    other = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
    shift, weight, tables = model.shift, layer.weight, layer._parameters
    for restores in (False, False, True):
        for module, first in firsts:
            module.__dict__ = first if restores else dict(module.__dict__)
        replays(served, model)
        model.scale = 3.0
        refused(served, r"scale is 3\.0, was 2\.0")
        model.scale, model.shift = 2.0, torch.zeros(WIDTH)
        refused(served, r"shift'? (is at|was replaced)", AddressChangedError)
        model.shift, layer.weight = shift, other
        refused(served, r"weight'? (is at|was replaced)", AddressChangedError)
        layer.weight = weight
        layer.__dict__["_parameters"] = {**tables, "weight": other}
        refused(served, r"_parameters", AddressChangedError)
        layer.__dict__["_parameters"] = tables
        replays(served, model)
    model.__dict__ = {**model.__dict__, "shift": torch.zeros(WIDTH)}
    refused(served, r"shift'? (is at|was replaced)", AddressChangedError)
    layer.__dict__ = {**layer.__dict__, "_parameters": dict(tables)}
    refused(served, r"__dict__ is another dict")


def frozen_layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class Helped(nn.Module):
    """Runs a layer that ``call`` finds in a plain attribute or a global."""

    def __init__(self, helper: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.helper, self.call = helper, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.helper, x)


@pytest.mark.parametrize("kind", [kind for kind in HELPERS if kind != "a global"])
def test_weights_of_a_layer_that_replaced_one_in_a_helper(kind: str) -> None:
    """It has the same weights at first, and is compared as that of the capture is."""
    make, call = HELPERS[kind]
    first, same = frozen_layer(), frozen_layer()
    same.weight, same.bias = first.weight, first.bias
    model = Helped(make(first), call)
    served = captured("CUDAGraphWrapper", model)
    model.helper = make(same)
    replays(served, model)
    same.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    refused(served, r"weight is at", AddressChangedError)
    same.weight = first.weight
    replays(served, model)
    model.helper = make(first)
    replays(served, model)


@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("name", [*WRAPPERS, "CudaGraphManager"])
def test_an_attribute_hides_the_bias_of_one_of_many_layers(name: str, layers: int) -> None:
    model = Scaled(layers)
    served = captured(name, model)
    replays(served, model)
    model.layers[-1].__dict__["bias"] = torch.zeros(WIDTH)
    refused(served, r"layers\.\d+\.bias is .*missing when captured")
    del model.layers[-1].__dict__["bias"]
    replays(served, model)


@pytest.mark.parametrize("name", [*WRAPPERS, "CudaGraphManager"])
def test_a_layer_in_a_list_gets_a_bias_that_it_had_not(name: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    model = Helped([layer], lambda held, x: held[0](x))
    served = captured(name, model)
    replays(served, model)
    layer.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    refused(served, r"helper\[0\]\.bias is .*, was None when captured")
    layer.bias = None
    replays(served, model)


@pytest.mark.parametrize("name", WRAPPERS)
def test_weights_of_layers_in_helpers_may_be_replaced_between_captures(name: str) -> None:
    model = Helped([frozen_layer()], lambda held, x: held[0](x))
    served = captured(name, model)
    replays(served, model)
    for change in (
        lambda: setattr(model.helper[0].weight, "data", torch.randn(WIDTH, WIDTH)),
        lambda: setattr(model.helper[0], "weight", nn.Parameter(torch.eye(WIDTH), False)),
        lambda: model.helper.__setitem__(0, frozen_layer()),
    ):
        change()
        refused(served, r"weight is at", AddressChangedError)
        served.target.clear_graphs()
        with torch.inference_mode():
            served.step(torch.randn(ROWS, WIDTH))
        replays(served, model)


def test_a_manager_without_the_check_of_weights_compares_no_weight_as_state() -> None:
    model = Helped([frozen_layer()], lambda held, x: held[0](x))
    model.scale = 1.0
    model.forward = lambda x: model.call(model.helper, x) * model.scale
    served = captured("CudaGraphManager", model, checks="-weights")
    replays(served, model)
    before = model.helper[0].weight
    model.helper[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
    model.scale = 2.0
    refused(served, r"scale is 2\.0, was 1\.0")
    model.scale = 1.0
    x = torch.randn(ROWS, WIDTH)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, before, model.helper[0].bias)
        torch.testing.assert_close(served.step(x), expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_another_class_of_an_object_that_replaced_an_equal_one(name: str) -> None:
    class Once(types.SimpleNamespace):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Twice(Once):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * 2

    model = Helped(Once(scale=3.0), lambda held, x: held.run(x))
    served = captured(name, model)
    replays(served, model)
    model.helper = Once(scale=3.0)
    replays(served, model)
    model.helper.__class__ = Twice
    refused(served, r"helper\.__class__ is .*Twice, was .*Once")
    model.helper.__class__ = Once
    replays(served, model)


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_object_that_is_held_twice_and_replaced_once(name: str) -> None:
    model = Parts()
    model.items[0] = model.table
    served = captured(name, model)
    replays(served, model)
    for _ in range(3):
        model.table = {"factor": 1.0}
        model.part = model.another_part(1.0)
        replays(served, model)
    model.items[0]["factor"] = 3.0
    refused(served, r"self\.items\[0\]\['factor'\] is 3\.0, was 1\.0")
    model.items[0] = model.table
    replays(served, model)
    model.table["factor"] = 3.0
    refused(served, r"self\.\w+(\[0\])?\['factor'\] is 3\.0, was 1\.0")


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_equal_view_in_place_of_another(name: str) -> None:
    model = Parts()
    served = captured(name, model)
    for _ in range(4):
        model.part.scale = model.part.scale[:]
        replays(served, model, 1)
    model.part.scale = torch.full((WIDTH,), 3.0)
    refused(served, r"self\.part\.scale", AddressChangedError)


def test_a_write_while_watched_dicts_are_renewed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [types.SimpleNamespace(factor=2.0) for _ in range(2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.parts[0].factor * self.parts[1].factor

    model = Reads()
    served = captured("CUDAGraphWrapper", model)
    replays(served, model)
    create = raw_memory.DictVersions.__init__

    def writing(self: Any, *dicts: Any) -> None:  # as another thread may
        model.parts[1].factor = 3.0
        create(self, *dicts)

    model.parts[0].factor = float("2")
    with monkeypatch.context() as patched:
        patched.setattr(raw_memory.DictVersions, "__init__", writing)
        refused(served, r"parts\[1\]\.factor is 3\.0, was 2\.0")
    refused(served, r"parts\[1\]\.factor is 3\.0, was 2\.0")
    model.parts[1].factor = 2.0
    replays(served, model)


class Loading(dict[str, float]):
    """Its items are modules, which ``values`` would import."""

    def values(self) -> Any:
        raise AssertionError


TABLE = Loading(k=2.0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_methods_of_a_global_dict_are_not_called(name: str) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * TABLE["k"]

    served = captured(name, Reads())
    replays(served, Reads())
    TABLE["k"] = 3.0
    refused(served, r"TABLE\['k'\] is 3\.0, was 2\.0")
    TABLE["k"] = 2.0


@pytest.mark.parametrize("name", WRAPPERS)
def test_code_of_a_namespace_whose_name_is_no_text(name: str) -> None:
    scope: dict[str, Any] = {"__name__": 7, "factor": 2.0}
    exec("def scaled(x): return x * factor", scope)
    scaled = scope["scaled"]

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(x)

    served = captured(name, Calls())
    replays(served, Calls())
    scope["factor"] = 3.0
    refused(served, r"factor is 3\.0, was 2\.0")


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_comparison_adds_no_item(name: str) -> None:
    model = Scaled()
    model.table = collections.defaultdict(float, k=2.0)
    served = captured(name, model)
    replays(served, model)
    del model.table["k"]
    refused(served, r"self\.table\['k'\] is missing, was 2\.0")
    assert not model.table
    model.table["k"] = 2.0
    replays(served, model)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_dict_is_compared_after_others_were_written_and_replaced(name: str) -> None:
    model = Scaled(3)
    served = captured(name, model)
    for index in range(3):  # as many dicts are new as were written
        model.table = dict(model.table)
        model.unread = index
        replays(served, model)
    model.table["k"] = 3.0
    refused(served, r"self\.table\['k'\] is 3\.0, was 1\.0")


def _scaled_by(factor: float) -> Callable[..., Any]:
    return lambda x, *, by=factor: x * by


class Helper:
    power = 2.0


class Pool(nn.MaxPool1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Choices(nn.Module):
    """Reads a class, a tuple, an object that cannot be opened, and attributes that may be added."""

    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.columns = (1.0, (2.0,)), slice(0, 4)
        self.helper, self.scaled = Helper(), _scaled_by(1.0)
        self.pool = Pool(3, padding=(1,))
        self.last: Any = None

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def for_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.made = 1.0
        return x * self.made

    @functools.cached_property
    def rows(self) -> int:
        return ROWS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.helper.shape = self.last = x.shape, x.dtype
        x = self.pool(self.act(self.scaled(x)))
        x = (x * self.pair[1][0] + self.offset) * getattr(self, "gain", 1.0)
        x = x if len(x) == ROWS else self.for_many_rows(x) * self.rows
        return x[:, self.columns] * self.helper.power


CHANGES: dict[str, tuple[Callable[[Choices], Any], str]] = {
    "of its class": (
        lambda model: setattr(type(model), "offset", 3.0),
        r"\.offset is 3\.0, was 1\.",
    ),
    "over one of its class": (
        lambda model: setattr(model, "offset", 3.0),
        "offset is 3.0, was mis",
    ),
    "of a helper's class": (lambda model: setattr(Helper, "power", 3.0), r"Helper\.power is 3\.0"),
    "over one of a helper's class": (
        lambda model: setattr(model.helper, "power", 3.0),
        r"self\.helper\.power is 3\.0, was missing",
    ),
    "added": (lambda model: setattr(model, "gain", 3.0), r"self\.gain is 3\.0, was missing"),
    "over a method": (lambda model: setattr(model, "act", torch.relu), r"self\.act is"),
    "tuple": (lambda model: setattr(model, "pair", (1.0, (3.0,))), r"self\.pair\[1\]\[0\] is 3\.0"),
    "tuple of a layer": (lambda model: setattr(model.pool, "padding", (0,)), r"padding\[0\] is 0"),
    "slice": (lambda model: setattr(model, "columns", slice(2, 6)), r"self\.columns is another"),
    "default by name": (
        lambda model: setattr(model, "scaled", _scaled_by(3.0)),
        r"self\.scaled is",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_attribute(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "offset", 1.0)
    monkeypatch.setattr(Helper, "power", 2.0)
    model = Choices()
    served = captured(name, model)
    replays(served, model)
    with torch.inference_mode():
        model(torch.randn(2 * ROWS, WIDTH))  # which adds what no captured code reads
    model.pair, model.columns, model.scaled = (1.0, (2.0,)), slice(0, 4), _scaled_by(1.0)
    model.helper, model.unread = Helper(), 1
    replays(served, model)
    write, match = CHANGES[change]
    write(model)
    refused(served, match)


def test_names_of_code() -> None:
    def code(self: Any) -> Any:
        return getattr(self, "first", None), self.second["third"], SETTING

    names, global_names = names_loaded(code.__code__)
    assert {"first", "second", "third"} <= names
    assert "SETTING" in global_names


@pytest.mark.parametrize("name", WRAPPERS)
def test_captures_of_one_state_share_its_contract(name: str) -> None:
    """Each size follows equal objects, and refuses other values and other weights."""

    model = Scaled()
    wrapper = getattr(cgcompile, name)(model, settings("cpu"))
    buffers = {rows: torch.zeros(rows, WIDTH) for rows in (8, 4)}

    def check_all() -> None:
        for rows, buffer in buffers.items():
            buffer.copy_(torch.randn(rows, WIDTH))
            with torch.inference_mode(), context(rows):
                torch.testing.assert_close(wrapper(buffer), model(buffer))

    def refuse_all(match: str, error: Any) -> None:
        for rows, buffer in buffers.items():
            with torch.inference_mode(), context(rows), pytest.raises(error, match=match):
                wrapper(buffer)

    for _ in range(2):
        check_all()
    first, second = [entry.state for entry in wrapper.entries]
    assert first is second
    model.table = {"k": 1.0}
    check_all()
    check_all()
    assert (wrapper.counters.captures, wrapper.counters.replays) == (2, 6)
    model.table = {"k": 3.0}
    refuse_all("table", HostValueChangedError)
    model.table = {"k": 1.0}
    check_all()
    model.layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
    refuse_all("weight", AddressChangedError)
