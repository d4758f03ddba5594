"""What changes between calls, the modes a call is in, and that the doctor changes nothing."""

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass

import pytest
import torch
from lib.debug import examine, found, worse_than_notes
from torch import nn

import cgcompile
from cgcompile.config import CompilationConfig

BREAKABLE = CompilationConfig(splitting="breakable")


class Keeps(nn.Module):
    """State of every kind, and a forward that changes all of it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3))
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
        self.recent.append(self.step)
        self.kinds.add("b")
        self.table["n"].append(2)
        self.table["new"] = x.shape[0]
        self.total.add_(x.sum(0))
        self.transposed.t_()
        out.copy_(self.norm(x) + torch.rand(4, device=x.device))
        return out


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(5, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("kind", "marker", "severity", "untraced"),
    [
        ("changing_attribute", "step", "error", "error"),
        ("growing_state", "cat", "break", "error"),
        ("replaced_attribute", "replaced", "break", "error"),
        ("growing_state", "append", "break", "error"),
        ("lazy_attribute", "lazy", "note", "note"),
    ],
)
def test_attributes_that_forward_changes(kind, marker, severity, untraced) -> None:
    x, out = arguments()
    diagnosis = examine(Keeps(), x, out)
    assert found(diagnosis, kind, Keeps.forward, marker).severity == severity
    diagnosis = examine(Keeps(), x, out, config=BREAKABLE)
    assert found(diagnosis, kind, Keeps.forward, marker).severity == untraced


def picture(model: Keeps) -> dict:
    return copy.deepcopy({k: v for k, v in vars(model).items() if not k.startswith("_")})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_nothing_is_changed(device: str, mode) -> None:
    model = Keeps().to(device)
    model.cache, model.last = model.cache.to(device), model.last.to(device)
    x, out = (each.to(device) for each in arguments())
    generators = torch.cuda if device == "cuda" else torch
    held = {id(each) for each in (*model.buffers(), model.cache, model.last, model.table)}
    state, before = copy.deepcopy(model.state_dict()), picture(model)
    geometry = [(b.data_ptr(), b.shape, b.stride()) for b in model.buffers()]
    x_before, out_before = x.clone(), out.clone()
    random = generators.get_rng_state()
    with mode():
        diagnosis = cgcompile.debug.doctor(model, x, out)
    assert diagnosis.of_kind("growing_state")
    assert torch.equal(generators.get_rng_state(), random)
    assert torch.equal(x, x_before)
    assert torch.equal(out, out_before)
    assert held == {id(e) for e in (*model.buffers(), model.cache, model.last, model.table)}
    assert geometry == [(b.data_ptr(), b.shape, b.stride()) for b in model.buffers()]
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in state.items()
    }
    after = picture(model)
    assert str(after) == str(before)
    assert after["step"] == 0
    assert after["lazy"] is None
    assert after["recent"].maxlen == 3


class Renames(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key + "!", value)


@dataclass(frozen=True, slots=True)
class Frozen:
    table: torch.Tensor


def test_dicts_of_other_kinds_are_put_back() -> None:
    ordered, renamed = OrderedDict(a=1, b=2), Renames(a=1)

    def model(x):
        ordered.move_to_end("a")
        ordered["c"] = renamed["b"] = len(ordered)
        return x + 1

    assert not examine(model, torch.ones(2)).of_kind("forward_raised")
    assert list(ordered.items()) == [("a", 1), ("b", 2)]
    assert list(renamed.items()) == [("a!", 1)]
    assert list(reversed(ordered)) == ["b", "a"]


def test_what_a_model_does_after_is_what_it_would_have_done() -> None:
    torch.manual_seed(1)
    looked_at, other = Keeps(), Keeps()
    other.load_state_dict(looked_at.state_dict())
    results = []
    for model in (looked_at, other):
        x, out = arguments()
        if model is looked_at:
            examine(model, x, out)
        with torch.inference_mode():
            results.append([model(x, out).clone() for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


def test_slots_are_put_back() -> None:
    class Slots:
        __slots__ = ("late", "steps", "table")

        def __init__(self) -> None:
            self.steps, self.table = 0, torch.zeros(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.frozen = Slots(), Frozen(torch.zeros(2))

        def forward(self, x):
            self.own.steps += 1  # <steps>
            self.own.late = x + self.own.steps
            self.own.table.add_(1)
            self.frozen.table.add_(2)
            return x + self.own.table

    model = Model()
    table = model.own.table
    seen = found(examine(model, torch.ones(2)), "changing_attribute", Model.forward, "steps")
    assert (seen.op, "after it" in seen.message) == ("self.own.steps", True)
    assert (model.own.steps, hasattr(model.own, "late")) == (0, False)
    assert model.own.table is table
    assert (table.sum(), model.frozen.table.sum()) == (0, 0)


def test_state_is_put_back_after_an_error_too() -> None:
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


class Grows:
    """A cache as generation has it: an object that is passed in, and that grows."""

    def __init__(self):
        self.layers = []

    def update(self, k):
        self.layers.append(k)
        self.keys = torch.cat(self.layers)  # <grow>
        return self.keys


def test_a_cache_among_the_arguments_that_grows() -> None:
    class Attends(nn.Module):
        def forward(self, x, cache):
            return x @ cache.update(x).t()

    cache = Grows()
    diagnosis = examine(Attends(), torch.ones(2, 3), cache=cache)
    found(diagnosis, "growing_state", Grows, "grow")
    assert cache.layers == []
    assert not hasattr(cache, "keys")


def writes(x, seen, scale, rows):
    seen.add_(x.sum())  # the cache that it is given
    return x * scale


def test_inputs_that_move_and_numbers_that_change() -> None:
    steady, numbers = torch.zeros(2), iter((3, 4))

    def prepare():
        return (torch.ones(2), torch.zeros(2), 2.0), {"rows": [steady, next(numbers)]}

    diagnosis = examine(writes, prepare=prepare)
    (moved,) = diagnosis.of_kind("moving_input")
    (bound,) = diagnosis.of_kind("rebound_input")
    (number,) = diagnosis.of_kind("changing_argument")
    assert (moved.op, moved.severity) == ("input 0", "note")
    assert (bound.op, bound.severity) == ("input 1", "break")
    assert (number.op, number.severity) == ("input 'rows'[1]", "break")
    assert moved.source.code == "def writes(x, seen, scale, rows):"
    assert len(diagnosis.findings) == 3, str(diagnosis)


def test_an_input_that_moves_under_a_forward_context_is_an_error() -> None:
    mode, batch = cgcompile.CUDAGraphMode.PIECEWISE, cgcompile.BatchDescriptor(2)
    context = cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch)

    def severities(**settings) -> list[str]:
        config = CompilationConfig(**settings)
        with context:
            diagnosis = examine(nn.ReLU(), prepare=lambda: torch.ones(2), config=config)
        return [each.severity for each in diagnosis.of_kind("moving_input")]

    assert severities() == ["error"]
    assert severities(on_input_change="copy") == ["note"]


def test_inputs_of_another_structure() -> None:
    sizes = iter((1, 2))
    diagnosis = examine(sum, prepare=lambda: ([torch.ones(1)] * next(sizes),))
    assert [e.op for e in diagnosis.of_kind("changing_argument")] == ["the arguments"]


def test_a_number_among_the_arguments() -> None:
    class Pads(nn.Module):
        def forward(self, x, longest, flag=True):  # <forward>
            return x[:longest]

    seen = found(examine(Pads(), torch.ones(3), 2), "host_argument", Pads.forward, "forward")
    assert (seen.op, seen.severity) == ("input 1", "note")


def test_grad_mode() -> None:
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):  # <forward>
            return x * self.scale

    diagnosis = cgcompile.debug.doctor(Scales(), torch.ones(2))
    seen = found(diagnosis, "gradients", Scales.forward, "forward")
    assert (seen.op, seen.severity) == ("self.scale", "break")
    frozen = Scales().requires_grad_(False)
    assert cgcompile.debug.doctor(frozen, torch.ones(2)).findings == ()
    (seen,) = cgcompile.debug.doctor(frozen, torch.ones(2, requires_grad=True)).findings
    assert (seen.kind, seen.op) == ("gradients", "input 0")
    with torch.no_grad():
        assert cgcompile.debug.doctor(Scales(), torch.ones(2)).findings == ()


def test_weights_of_inference_mode() -> None:
    """They may be read in any mode, as graphs do; they cannot be kept for gradients."""
    with torch.inference_mode():
        model, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    x = torch.ones(1, 2)
    assert examine(model, x).findings == ()
    assert cgcompile.debug.doctor(frozen, x).findings == ()
    with torch.no_grad():
        assert cgcompile.debug.doctor(model, x).findings == ()
    seen = cgcompile.debug.doctor(frozen, x.requires_grad_())
    assert [each.kind for each in seen.findings] == ["inference_tensor", "gradients"]
    assert "cannot be saved for backward" in seen.findings[0].message
    assert not seen.ok


def test_inputs_that_no_graph_takes() -> None:
    def total(x):  # <sparse>
        return x.to_dense() + 1

    diagnosis = examine(total, torch.eye(2).to_sparse())
    assert found(diagnosis, "unsupported_input", total, "sparse").op == "input 0"


@pytest.mark.gpu
def test_copies_from_pinned_memory_can_be_captured() -> None:
    class Uploads(nn.Module):
        def forward(self, x, rows):
            return x + rows.to(x.device, non_blocking=True)  # <upload>

    x = torch.ones(2, device="cuda")
    for rows, severity in ((torch.ones(2), "error"), (torch.ones(2).pin_memory(), "note")):
        diagnosis = examine(Uploads(), x, rows, config=BREAKABLE)
        assert found(diagnosis, "device_copy", Uploads.forward, "upload").severity == severity


def test_parts_that_are_compiled_capture_nothing() -> None:
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    part = model[1].forward = cgcompile.compile(model[1].forward, backend)
    for _ in range(2):
        assert not worse_than_notes(examine(model, torch.ones(1, 2)))
    assert backend.num_compilations == 0
    assert model[1].forward is part
    function = torch.compile(lambda x: x * x.sum().item(), backend=backend)
    assert examine(function, torch.ones(2)).of_kind("host_sync")


def test_a_function_that_has_a_name_from_around_it_which_is_bound_later() -> None:
    def forward(x):
        return x + 1 if x.dim() else later

    assert examine(forward, torch.randn(3)).ok
    later = 0


@dataclass
class Step:
    """Equal to others, so it has no hash."""

    number: int = 0


def test_state_in_an_object_without_a_hash() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Step()

        def forward(self, x):
            self.step.number += 1  # <number>
            return x + 1

    model = Model()
    seen = found(examine(model, torch.ones(2)), "changing_attribute", Model.forward, "number")
    assert (seen.op, model.step.number) == ("self.step.number", 0)
