"""State and inputs that change between calls are findings, and the doctor restores all of them."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lib.debug import by_line, examine, kinds, worse_than_notes
from torch import nn

import cgcompile
from cgcompile import CompilationConfig


class Keeps(nn.Module):
    """State of every kind, and a forward that changes all of it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("moved", torch.zeros(2))
        self.cache, self.last = torch.zeros(0, 4), torch.zeros(4)
        self.step, self.lazy = 0, None
        self.seen, self.recent, self.kinds, self.table = [], deque(maxlen=3), {"a"}, {"n": [1]}

    def forward(self, x, out):
        if self.lazy is None:
            self.lazy = 3.5  # <lazy>
        self.step += 1  # <step>
        self.cache = torch.cat([self.cache, x])  # <cat>
        self.last = x[0] * 2  # <replaced>
        self.seen.append(x.sum(0))  # <append>
        self.recent.append(self.step)  # <recent>
        self.kinds.add("b")  # <kinds>
        self.table["n"].append(2)  # <table>
        self.table["new"] = x.shape[0]
        self.total.add_(x.sum(0))
        self.transposed.t_()  # <transposed>
        self.moved.data = self.moved + 1  # <moved>
        out.copy_(self.norm(x) + torch.rand(4, device=x.device))  # <out>
        return out


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(5, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(("splitting", "worst"), [("fx", "break"), ("breakable", "error")])
def test_attributes_that_forward_changes(splitting: str, worst: str) -> None:
    diagnosis = examine(Keeps(), *arguments(), config=CompilationConfig(splitting=splitting))
    findings = kinds(diagnosis)
    assert {key: findings.get(key) for key in ("step", "cat", "replaced", "append", "lazy")} == {
        "step": "changing_attribute error",
        "cat": f"growing_state {worst}",
        "replaced": f"replaced_attribute {worst}",
        "append": f"growing_state {worst}",
        "lazy": "lazy_attribute note",
    }


def picture(model: Keeps) -> Any:
    """The values of all state, and the tensor objects with their memory."""
    values = {name: v for name, v in vars(model).items() if not name.startswith("_")}
    tensors = (*model.buffers(), model.cache, model.last)
    objects = [(id(t), t.data_ptr(), t.shape, t.stride(), t.tolist()) for t in tensors]
    return str(values), objects, id(model.table)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_nothing_is_changed(device: str, mode: Any) -> None:
    model = Keeps().to(device)
    model.cache, model.last = model.cache.to(device), model.last.to(device)
    x, out = (tensor.to(device) for tensor in arguments())
    generators = torch.cuda if device == "cuda" else torch
    before, random = picture(model), generators.get_rng_state()
    inputs = x.clone(), out.clone()
    with mode():
        diagnosis = cgcompile.debug.doctor(model, x, out)
    assert diagnosis.of_kind("growing_state")
    assert torch.equal(generators.get_rng_state(), random)
    assert all(map(torch.equal, (x, out), inputs))
    assert picture(model) == before
    assert model.recent.maxlen == 3


def test_a_model_goes_on_as_if_it_had_not_been_examined() -> None:
    torch.manual_seed(1)
    examined, other = Keeps(), Keeps()
    other.load_state_dict(examined.state_dict())
    results = []
    for model in (examined, other):
        x, out = arguments()
        if model is examined:
            examine(model, x, out)
        with torch.inference_mode():
            results.append([model(x, out).clone() for _ in range(2)])
    assert all(map(torch.equal, *results))
    assert not torch.equal(*results[0])


class Renames(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key + "!", value)


def test_dicts_of_other_kinds_are_restored() -> None:
    ordered, renamed = OrderedDict(a=1, b=2), Renames(a=1)

    def model(x):
        ordered.move_to_end("a")
        ordered["c"] = renamed["b"] = len(ordered)
        return x + 1

    assert not examine(model, torch.ones(2)).of_kind("forward_raised")
    assert list(ordered.items()) == [("a", 1), ("b", 2)]
    assert list(renamed.items()) == [("a!", 1)]
    assert list(reversed(ordered)) == ["b", "a"]


@dataclass(frozen=True, slots=True)
class Frozen:
    table: torch.Tensor


class Slots:
    __slots__ = ("late", "steps", "table")

    def __init__(self) -> None:
        self.steps, self.table = 0, torch.zeros(2)


@dataclass
class Unhashable:
    number: int = 0


def test_objects_of_any_kind_are_restored() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.frozen, self.step = Slots(), Frozen(torch.zeros(2)), Unhashable()

        def forward(self, x):
            self.own.steps += 1  # <steps>
            self.step.number += 1  # <number>
            self.own.late = x + self.own.steps  # <late>
            self.own.table.add_(1)
            self.frozen.table.add_(2)
            return x + self.own.table

    model = Model()
    table = model.own.table
    findings = by_line(examine(model, torch.ones(2)))
    for key, op in (("steps", "self.own.steps"), ("number", "self.step.number")):
        assert (findings[key].kind, findings[key].op) == ("changing_attribute", op)
        assert "after it" in findings[key].message
    assert (model.own.steps, model.step.number, hasattr(model.own, "late")) == (0, 0, False)
    assert model.own.table is table
    assert (table.sum(), model.frozen.table.sum()) == (0, 0)


def test_state_is_restored_after_an_error_too() -> None:
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x):
            self.total += x
            self.extra = x
            raise ValueError("late")

    model = Fails()
    assert not examine(model, torch.ones(2)).ok
    assert model.total.tolist() == [0.0, 0.0]
    assert not hasattr(model, "extra")


def test_variables_around_a_function_are_restored() -> None:
    steps, last, pages = 0, None, [1]

    def counts(x):
        nonlocal steps, last, pages
        steps += 1  # <steps>
        last, pages = x * steps, [*pages, 2]
        return last

    first = pages
    diagnosis = examine(counts, torch.ones(2))
    assert {finding.kind for finding in diagnosis.findings} >= {"changing_attribute"}, diagnosis
    assert (steps, last, pages) == (0, None, [1])
    assert pages is first


class Grows:
    """A cache as generation has it: an argument that grows."""

    def __init__(self):
        self.layers = []

    def update(self, k):
        self.layers.append(k)  # <layers>
        self.keys = torch.cat(self.layers)  # <grow>
        return self.keys


def test_a_cache_among_the_arguments_that_grows() -> None:
    def attends(x, cache):
        return x @ cache.update(x).t()

    cache = Grows()
    findings = kinds(examine(attends, torch.ones(2, 3), cache=cache))
    assert findings["grow"] == "growing_state break"
    assert vars(cache) == {"layers": []}


# ---------------------------------------------------------------- inputs of two calls


def writes(x, seen, scale, rows):
    seen.add_(x.sum())
    return x * scale


def test_inputs_that_move_and_numbers_that_change() -> None:
    steady, numbers = torch.zeros(2), iter((3, 4))

    def prepare():
        return (torch.ones(2), torch.zeros(2), 2.0), {"rows": [steady, next(numbers)]}

    diagnosis = examine(writes, prepare=prepare)
    assert kinds(diagnosis) == {
        "input 0": "moving_input note",
        "input 1": "rebound_input break",
        "input 'rows'[1]": "changing_argument break",
    }
    assert {found.source.code for found in diagnosis.findings} == {
        "def writes(x, seen, scale, rows):"
    }


def test_an_input_that_moves_under_a_forward_context_is_an_error() -> None:
    mode, batch = cgcompile.CUDAGraphMode.PIECEWISE, cgcompile.BatchDescriptor(2)
    for policy, severity in (("raise", "error"), ("copy", "note")):
        config = CompilationConfig(on_input_change=policy)
        with cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
            diagnosis = examine(nn.ReLU(), prepare=lambda: torch.ones(2), config=config)
        assert kinds(diagnosis) == {"input 0": f"moving_input {severity}"}


def test_inputs_of_another_structure() -> None:
    sizes = iter((1, 2))
    diagnosis = examine(sum, prepare=lambda: ([torch.ones(1)] * next(sizes),))
    assert kinds(diagnosis) == {"the arguments": "changing_argument break"}


# ---------------------------------------------------------------- functions


def test_compiled_parts_capture_nothing() -> None:
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    part = model[1].forward = cgcompile.compile(model[1].forward, backend)
    for _ in range(2):
        assert not worse_than_notes(examine(model, torch.ones(1, 2)))
    assert backend.num_compilations == 0
    assert model[1].forward is part
    function = torch.compile(lambda x: x * x.sum().item(), backend=backend)
    assert examine(function, torch.ones(2)).of_kind("host_sync")


def test_a_name_of_a_closure_may_be_bound_later() -> None:
    def forward(x):
        return x + 1 if x.dim() else later

    assert examine(forward, torch.randn(3)).ok
    later = 0
