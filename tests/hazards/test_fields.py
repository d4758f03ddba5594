"""Fields of objects: those that a graph read are compared, those that a capture rebinds refuse it."""

import copy
import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from lib.front_ends import FRONT_ENDS, MANAGERS, ROWS, WIDTH, WRAPPERS, front_end, settings
from torch import nn

import cgcompile
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    DispatchError,
    GuardError,
    HostValueChangedError,
)
from cgcompile.graphs.capture import bulk_capture
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")


@dataclasses.dataclass
class Record:
    t: torch.Tensor
    k: float = 1.0
    more: Any = None


class Plain:
    def __init__(self, t: torch.Tensor, k: float = 1.0, more: Any = None) -> None:
        self.t, self.k, self.more = t, k, more


class Slotted:
    __slots__ = ("k", "more", "t")

    def __init__(self, t: torch.Tensor, k: float = 1.0, more: Any = None) -> None:
        self.t, self.k, self.more = t, k, more


class Table(dict):
    """A dictionary of a kind that pytree does not open."""

    def __init__(self, t: torch.Tensor, k: float = 1.0, more: Any = None) -> None:
        super().__init__(t=t, k=k, more=more)

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Module(nn.Module):
    def __init__(self, t: torch.Tensor, k: float = 1.0, more: Any = None) -> None:
        super().__init__()
        self.register_buffer("t", t)
        self.k, self.more = k, more


def namespace(t: torch.Tensor, k: float = 1.0, more: Any = None) -> SimpleNamespace:
    return SimpleNamespace(t=t, k=k, more=more)


KINDS: list[Callable[..., Any]] = [Record, Plain, Slotted, Table, Module, namespace]


def scaled(x: torch.Tensor, *, options: Any) -> torch.Tensor:
    return x + options.t * options.k


class Called:
    """A step with an object among its arguments, behind a wrapper."""

    def __init__(
        self, name: str, device: str, options: Any, run: Any = scaled, **more: Any
    ) -> None:
        self.run, self.options = run, options
        self.wrapper = getattr(cgcompile, name)(run, settings(device, **more), FULL)
        self.x = torch.empty(ROWS, WIDTH, device=device)

    def __call__(self) -> torch.Tensor:
        self.x.uniform_()
        with step(ROWS, FULL):
            return self.wrapper(self.x, options=self.options)

    def check(self) -> None:
        """The result of a call is eager's."""
        torch.testing.assert_close(self(), self.run(self.x, options=self.options))


def called(name: str, device: str, kind: Any, **more: Any) -> Called:
    subject = Called(name, device, kind(torch.rand(WIDTH, device=device)), **more)
    for _ in range(3):
        subject.check()
    assert (subject.wrapper.counters.captures, subject.wrapper.counters.replays) == (1, 2)
    return subject


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_number_and_a_tensor_of_an_object(name: str, device: str, kind: Any) -> None:
    subject = called(name, device, kind)
    subject.options.k = 5.0
    with pytest.raises(HostValueChangedError, match=r"'options'.*k.* is 5.0, was 1.0"):
        subject()
    subject.options.k = 1.0
    subject.options.t.mul_(2)  # in place: a graph sees it
    subject.check()
    old = subject.options.t
    subject.options.t = torch.rand(WIDTH, device=device)
    with pytest.raises(AddressChangedError, match=r"'options'.*t.* is at 0x"):
        subject()
    subject.options.t = old
    subject.check()
    assert subject.wrapper.counters.replays == 4


@pytest.mark.parametrize("path", [("on", "bias"), ("off", "mask")])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_value_under_another_name(name: str, device: str, path: tuple[str, str]) -> None:
    more: dict[str, Any] = {"on": {"mask": None}, "off": {}}
    subject = Called(name, device, Record(torch.rand(WIDTH, device=device), more=more))
    for _ in range(3):
        subject.check()
    more[path[0]][path[1]] = more["on"].pop("mask")
    with pytest.raises(HostValueChangedError, match="more"):
        subject()
    assert subject.wrapper.counters.replays == 2


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_the_other_policies(name: str, device: str, policy: str) -> None:
    subject = called(name, device, Record, on_input_change=policy)
    subject.options.k = 5.0
    subject.check()
    subject.options.t = torch.rand(WIDTH, device=device)
    subject.check()
    counters = subject.wrapper.counters
    expected = (1, 2) if policy == "eager" else (3, 0)
    assert (counters.captures, counters.plain[Reason.INPUT_CHANGED]) == expected


def nested(x: torch.Tensor, *, options: Any) -> torch.Tensor:
    inner = options.more[0]["deep"]
    return x + inner.t * inner.k


def changed_number(inner: Any) -> None:
    inner.k = 2.0


def changed_tensor(inner: Any) -> None:
    inner.t = inner.t.clone()


def changed_data(inner: Any) -> None:
    inner.t.data = inner.t.clone()


@pytest.mark.parametrize("change", [changed_number, changed_tensor, changed_data])
@pytest.mark.parametrize("name", WRAPPERS)
def test_objects_in_objects(name: str, device: str, change: Callable[[Any], None]) -> None:
    inner = Plain(torch.rand(WIDTH, device=device))
    outer = Record(torch.rand(WIDTH, device=device), more=[{"deep": inner}])
    inner.more = outer  # a cycle
    subject = Called(name, device, outer, nested)
    for _ in range(3):
        subject.check()
    change(inner)
    with pytest.raises(GuardError, match=r"more\[0\]\['deep'\]\.[tk] is"):
        subject()
    assert subject.wrapper.counters.replays == 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_containers_that_are_built_anew_and_hold_the_same(name: str, device: str) -> None:
    inner = Plain(torch.rand(WIDTH, device=device))
    subject = Called(name, device, Record(inner.t, more=[{"deep": inner}]), nested)
    for _ in range(4):
        subject.options.more = [{"deep": inner}]
        subject.check()
    assert subject.wrapper.counters.replays == 3
    subject.options.more[0]["deep"] = Plain(inner.t, 3.0)
    with pytest.raises(HostValueChangedError, match="more"):
        subject()


def arrays(x: torch.Tensor, *, options: Any) -> torch.Tensor:
    return x * float(options.more[0])


@pytest.mark.parametrize("kind", [np.array, lambda values: array("d", values), bytearray])
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_array_of_the_host(name: str, device: str, kind: Any) -> None:
    values = kind([1, 1])
    subject = Called(name, device, Record(torch.ones(1), more=values), arrays)
    for _ in range(3):
        subject.check()
    values[0] = 3
    with pytest.raises(HostValueChangedError, match="more"):
        subject()
    assert subject.wrapper.counters.replays == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_too_many_fields_run_plain(name: str, device: str) -> None:
    subject = Called(name, device, Record(torch.rand(WIDTH, device=device)))
    subject.options.more = [[(place,) for place in range(9000)] for _ in range(12)]
    for _ in range(3):
        subject.check()
    counters = subject.wrapper.counters
    assert (counters.captures, counters.plain[Reason.UNSUPPORTED_INPUT]) == (0, 3)


# ---------------------------------------------------------------- rebound in a capture


class Rebinds(nn.Module):
    """Rebinds a buffer at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state * 0.5 + 1
        return x + self.state


class Counts(Rebinds):
    """Counts its steps in a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = getattr(self, "count", 0) + 1
        return x * self.count


class Renames(Rebinds):
    """Moves one value from name to name."""

    def __init__(self) -> None:
        super().__init__()
        self.kept_odd = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "kept_odd"):
            del self.kept_odd
            self.kept_even = True
            return x * 2
        del self.kept_even
        self.kept_odd = True
        return x * 3


class Lists(Rebinds):
    """Keeps tensors in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = [1.0]
        self.kept_by_name: dict[str, Any] = {"last": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[0] = x.new_ones(()) + self.kept[0]
        self.kept_by_name["last"] = self.kept[0] * 2
        return x * self.kept[0] + self.kept_by_name["last"]


class Cache:
    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(WIDTH, device=device)


class Holds(Rebinds):
    """Keeps an object whose field is rebound."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.cache = Cache(x.device)
        self.cache.total = self.cache.total + x.sum(0)
        return x + self.cache.total


class Swaps(Rebinds):
    """Exchanges two buffers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state, self.other = self.other, self.state
        return x + self.state


REBINDING = [Rebinds, Counts, Renames, Lists, Holds, Swaps]


@pytest.mark.parametrize("kind", REBINDING)
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_field_that_a_step_rebinds(name: str, device: str, kind: type[nn.Module]) -> None:
    """Warm-ups and captures of a manager run the step on their own inputs, so it starts after."""
    model = kind().to(device)
    served = front_end(name, model, device)
    with torch.inference_mode():
        served.step(torch.rand(ROWS, WIDTH, device=device))
        expected = copy.deepcopy(model)
        for _ in range(5):
            x = torch.rand(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x).clone(), expected(x))
    for field, value in fields(expected).items():
        torch.testing.assert_close(fields(model)[field], value)
    if name in WRAPPERS:
        counters = served.counters()
        assert (counters.captures, counters.plain[Reason.CAPTURE_FAILED]) == (0, 6)
        assert "rebinds self." in counters.details[Reason.CAPTURE_FAILED]


class ScriptedCounter(nn.Module):
    count: int

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Scripted(nn.Module):
    """Holds a module of TorchScript that counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(ScriptedCounter())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", ["torch.compile", *WRAPPERS, *MANAGERS])
def test_a_module_of_torchscript_runs_plain(name: str, device: str) -> None:
    """Its fields are in C++: a graph would repeat the count of the capture."""
    model = Scripted()
    served = front_end(name, model, device)
    with torch.inference_mode():
        served.step(torch.rand(ROWS, WIDTH, device=device))  # managers warm up on their own inputs
        first = model.inner.count
        for count in range(1, 4):
            x = torch.rand(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), x * (first + count))
    if name in WRAPPERS:
        counters = served.counters()
        assert (counters.captures, counters.plain[Reason.CAPTURE_FAILED]) == (0, 4)
        detail = counters.details[Reason.CAPTURE_FAILED]
        assert detail.startswith("self.inner is a RecursiveScriptModule: the fields of a module of")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_module_of_torchscript_as_an_argument(name: str, device: str) -> None:
    inner = Scripted().inner
    argument = Called(name, device, inner, lambda x, *, options: options(x))
    for count in range(1, 4):
        torch.testing.assert_close(argument(), argument.x * count)
    counters = argument.wrapper.counters
    assert (counters.captures, counters.plain[Reason.UNSUPPORTED_INPUT]) == (0, 3)


def fields(model: nn.Module) -> dict[str, Any]:
    own = {name: each for name, each in vars(model).items() if name.startswith(("count", "kept"))}
    if hasattr(model, "cache"):
        own["cache"] = model.cache.total
    return {**dict(model.named_buffers()), **own}


@pytest.mark.parametrize("name", WRAPPERS)
def test_strict_leaves_the_module_as_it_was(name: str, device: str) -> None:
    model = Counts().to(device)
    model.count = 7
    served = front_end(name, model, device, on_fallback="raise")
    for _ in range(3):
        with pytest.raises(DispatchError, match=r"rebinds self\.count"):
            served.step(torch.rand(ROWS, WIDTH, device=device))
        assert model.count == 7


class Breaks(Rebinds):
    """Rebinds fields before, in and after an eager break."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds, self.count = kinds, 0
        self.names = {"0": torch.ones(())}
        self.scale = cgcompile.eager_break_during_capture(self.break_)

    def rebind(self, kind: str, y: torch.Tensor) -> None:
        if kind == "number":
            self.count += 1
        elif kind == "name":
            (name,) = self.names
            self.names[name + "0"] = self.names.pop(name)
        elif kind == "buffer":
            self.state = self.state * 0.5 + y.sum(0)

    def break_(self, x: torch.Tensor) -> torch.Tensor:
        self.rebind(self.kinds[1], x)
        (name,) = self.names
        return x * (self.count + len(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rebind(self.kinds[0], x)
        y = self.scale(x + 1)
        self.rebind(self.kinds[2], y)
        return y + self.state


@pytest.mark.parametrize(
    "kinds",
    [("", "number", ""), ("", "name", ""), ("", "number", "buffer"), ("name", "number", "")],
)
def test_an_eager_break_may_rebind(device: str, kinds: tuple[str, str, str]) -> None:
    model, expected = Breaks(*kinds).to(device), Breaks(*kinds).to(device)
    refused = bool(kinds[0] or kinds[2])
    wrapper = cgcompile.BreakableCUDAGraphWrapper(model, settings(device))
    x = torch.empty(ROWS, WIDTH, device=device)
    for _ in range(5):
        with step(ROWS, PIECEWISE):
            result = wrapper(x.uniform_()).clone()
        torch.testing.assert_close(result, expected(x))
        assert (model.count, [*model.names]) == (expected.count, [*expected.names])
        torch.testing.assert_close(model.state, expected.state)
        if wrapper.pool is not None:
            assert not wrapper.pool.holds(model.state.untyped_storage().data_ptr())
            wrapper.pool.poison()
            torch.testing.assert_close(model.state, expected.state)
    counters = wrapper.counters
    assert (counters.captures, counters.replays) == ((0, 0) if refused else (1, 4))
    assert counters.plain[Reason.CAPTURE_FAILED] == (5 if refused else 0)


def test_a_function_that_rebinds_what_is_around_it(device: str) -> None:
    state = {"total": torch.zeros(WIDTH, device=device)}
    count = 0

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        state["total"] = state["total"] + 1
        return x + state["total"] * count

    wrapper = cgcompile.CUDAGraphWrapper(run, settings(device))
    x = torch.empty(ROWS, WIDTH, device=device)
    for number in range(1, 5):
        with step(ROWS, FULL):
            torch.testing.assert_close(wrapper(x.uniform_()), x + number * number)
    assert wrapper.counters.plain[Reason.CAPTURE_FAILED] == 4


# ---------------------------------------------------------------- bookkeeping


class Log:
    """Counts calls, in all ways but in a module."""

    def __init__(self) -> None:
        self.calls, self.last = 0, None
        self.sizes: list[int] = []
        self.by_size: dict[int, int] = {}
        self.seen: set[int] = set()
        self.shapes: Any = ()

    def add(self, x: torch.Tensor) -> None:
        size = len(x)
        self.calls += 1
        self.sizes.append(size)
        self.by_size[size] = self.by_size.get(size, 0) + 1
        self.seen.add(self.calls)
        self.shapes = [*self.shapes, tuple(x.shape)]


class Logs(nn.Module):
    """Keeps a log of its calls, and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.names = Log(), ["first"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add(x)
        self.names.append(f"call {len(self.names)}")
        return x * 2 + 1


@pytest.mark.parametrize("name", WRAPPERS + MANAGERS)
def test_numbers_outside_of_modules_may_change(name: str, device: str) -> None:
    model = Logs().to(device)
    served = front_end(name, model, device)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.rand(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), x * 2 + 1)
    counters = served.counters()
    assert (counters.captures >= 1, counters.replays >= 3) == (True, True)
    assert Reason.CAPTURE_FAILED not in counters.plain
    assert model.log.calls == len(model.log.sizes) == len(model.names) - 1 >= 1


def test_a_number_around_a_function_may_change(device: str) -> None:
    calls = 0

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * 3

    wrapper = cgcompile.CUDAGraphWrapper(run, settings(device))
    x = torch.empty(ROWS, WIDTH, device=device)
    for _ in range(3):
        with step(ROWS, FULL):
            torch.testing.assert_close(wrapper(x.uniform_()), x * 3)
    assert (wrapper.counters.captures, wrapper.counters.replays, calls) == (1, 2, 1)


class Moves(Rebinds):
    """Replaces the memory of a tensor of an object that is no module."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.cache = Cache(torch.device(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.total.data = self.cache.total + 1
        return x + self.cache.total


@pytest.mark.parametrize("name", WRAPPERS)
def test_memory_of_an_object_that_a_step_replaces(name: str, device: str) -> None:
    model = Moves(device).to(device)
    start = model.cache.total.data_ptr()
    served = front_end(name, model, device)
    for _ in range(2):
        with pytest.raises(CaptureError, match="replaces the memory"):
            served.step(torch.rand(ROWS, WIDTH, device=device))
        assert model.cache.total.data_ptr() == start
        assert not model.cache.total.any()


class Grows(nn.Module):
    """Rebinds a tensor at batches of one size alone, and counts in a log."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.cache, self.log = Cache(torch.device(device)), Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add(x)
        if len(x) == 3:
            self.cache.total = self.cache.total + 1
        return x + self.cache.total


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_bulk_capture_follows_what_changes_between_captures(name: str, device: str) -> None:
    model = Grows(device).to(device)
    wrapper = getattr(cgcompile, name)(model, settings(device), FULL)
    expected = 0
    with bulk_capture():
        for rows in (1, 2, 3, 4, 3, 5):
            model.cache.total = model.cache.total.clone()  # no part of the step
            vars(model.cache)["count"] = rows
            x = torch.rand(rows, WIDTH, device=device)
            with step(rows, FULL):
                result = wrapper(x)
            expected += rows == 3
            torch.testing.assert_close(result, x + expected)
            assert model.cache.total.eq(expected).all()
    counters = wrapper.counters
    assert (counters.captures, counters.plain[Reason.CAPTURE_FAILED]) == (4, 2)
    assert "rebinds self.cache.total" in counters.details[Reason.CAPTURE_FAILED]


# ---------------------------------------------------------------- dataclasses that are made anew


@dataclasses.dataclass
class Stage:
    """What one stage of a pipeline hands to the next."""

    tensors: dict[str, torch.Tensor]
    scale: float = 2.0


def scaled_stage(stage: Stage) -> torch.Tensor:
    return stage.tensors["hidden"] * stage.scale


OTHER_STAGES = [
    (lambda t: Stage({"hidden": t}, 3.0), r"input 0\.scale is 3\.0, was 2\.0"),
    (lambda t: Stage({"hidden": t.clone()}), r"input 0\.tensors\['hidden'\] is at"),
    (lambda t: Stage({"hidden": t[:2]}), r"input 0\.tensors\['hidden'\] is a tensor \(2, 8\)"),
    (lambda t: Stage({"other": t}), r"input 0\.tensors\['hidden'\] is missing"),
    (lambda t: Stage({"hidden": t, "other": t}), r"list\(input 0\.tensors\) is .*'other'"),
]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_dataclass_made_anew_with_the_same_tensors(name: str, device: str) -> None:
    """Its fields are compared, and the first that differs is named."""
    wrapper = getattr(cgcompile, name)(scaled_stage, settings(device), FULL)
    hidden = torch.empty(ROWS, WIDTH, device=device)
    for _ in range(4):
        hidden.normal_()
        with step(ROWS, FULL):
            torch.testing.assert_close(wrapper(Stage({"hidden": hidden})), hidden * 2)
    assert wrapper.counters.replays == 3
    for other, path in OTHER_STAGES:
        with step(ROWS, FULL), pytest.raises(GuardError, match=path):
            wrapper(other(hidden))
    assert wrapper.counters.replays == 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_another_object_that_is_no_dataclass_is_refused(name: str, device: str) -> None:
    """It may have state that its attributes do not show."""
    wrapper = getattr(cgcompile, name)(lambda plain: plain.t * plain.k, settings(device), FULL)
    t = torch.randn(ROWS, WIDTH, device=device)
    plain = Plain(t)
    with step(ROWS, FULL):
        for _ in range(2):
            torch.testing.assert_close(wrapper(plain), t)
        with pytest.raises(HostValueChangedError, match="is another Plain object, was a Plain"):
            wrapper(Plain(t))
    assert wrapper.counters.replays == 1


def empty_slot(t: torch.Tensor, filled: bool = False) -> Slotted:
    value = Slotted(t)
    if not filled:
        del value.more
    return value


def shared(t: torch.Tensor, other: torch.Tensor | None = None) -> list[Any]:
    inner = [t]
    return [inner, inner if other is None else [other]]


def within_itself(t: torch.Tensor, other: Any = None) -> Plain:
    outer = Plain(t)
    outer.more = outer if other is None else other
    return outer


# What an argument holds at the capture, later, and how the error names the difference.
REPLACED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "longer list": (lambda t: [t], lambda t: [t, t], r"len\(input 'options'.*\) is 2, was 1"),
    "tuple for a list": (lambda t: [t], lambda t: (t,), "type of .* is tuple, was list"),
    "new key": (lambda t: {"k": t}, lambda t: {"k": t, "n": 1}, r"list\(.*\) is .*'n'"),
    "other order": (lambda t: {"k": 1, "n": 1}, lambda t: {"n": 1, "k": 1}, r"list\(.*\) is"),
    "negative zero": (lambda t: [0.0], lambda t: [-0.0], r"\[0\] is -0.0, was 0.0"),
    "bool for a number": (lambda t: [1], lambda t: [True], r"\[0\] is True, was 1"),
    "another layout": (lambda t: [t], lambda t: [t[::2]], r"\[0\] is a tensor \(4,\)"),
    "no tensor": (lambda t: [t], lambda t: [None], r"\[0\] is None, was a tensor"),
    "ordered dict": (
        lambda t: OrderedDict(k=[t]),
        lambda t: OrderedDict(k=[t, t]),
        "(structure|len)",
    ),
    "shared no more": (shared, lambda t: shared(t, t + 1), r"\[1\]\[0\] is at"),
    "within itself no more": (
        lambda t: Record(t, more=within_itself(t)),
        lambda t: Record(t, more=within_itself(t, Plain(t))),
        r"more.more is input 'options'.*more is False",
    ),
    "set": (lambda t: Record(t, more={1}), lambda t: Record(t, more={1, 2}), "more is a set"),
    "tensor in a set": (
        lambda t: Record(t, more={t}),
        lambda t: Record(t, more={t.clone()}),
        "more is a set",
    ),
    "slot": (
        lambda t: Record(t, more=empty_slot(t)),
        lambda t: Record(t, more=empty_slot(t, filled=True)),
        "whether input 'options'.*more has more is True",
    ),
    "object of another class": (
        lambda t: Record(t, more=Plain(t)),
        lambda t: Record(t, more=namespace(t)),
        "type of input 'options'.*more is SimpleNamespace, was Plain",
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", REPLACED)
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_argument_made_anew(name: str, device: str, kind: str, inside: bool) -> None:
    """One that holds the same is replayed; the first difference is named."""
    before, after, text = REPLACED[kind]
    t = torch.rand(WIDTH, device=device)
    around = (lambda value: Record(t, more=value)) if inside else lambda value: value
    subject = Called(name, device, around(before(t)), lambda x, *, options: x * 2)
    for _ in range(3):
        subject.options = around(before(t))
        subject.check()
    assert subject.wrapper.counters.replays == 2
    subject.options = around(after(t))
    with pytest.raises(GuardError, match=text):
        subject()
    subject.options = around(before(t))
    subject.check()
    assert subject.wrapper.counters.replays == 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_tensor_in_a_field_that_needs_gradients_now(name: str, device: str) -> None:
    """A graph returns no result that can be differentiated."""
    t = torch.rand(WIDTH, device=device)
    subject = Called(name, device, Record(t))
    with torch.enable_grad():
        for _ in range(3):
            subject.check()
        subject.options = Record(t.detach().requires_grad_())
        with pytest.raises(HostValueChangedError, match=r"'options'\.t\.requires_grad is True"):
            subject()
    assert subject.wrapper.counters.replays == 2
