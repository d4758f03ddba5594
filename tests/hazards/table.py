"""The table of hazards: what a program may change between a capture and a replay.

Each row builds a model whose result depends on something that Python reads, changes it after the
graphs were captured, and names the outcome of each front end (``lib.front_ends.COLUMNS``) that is
not ``RIGHT``. A new hazard is a row here.

``python -m tests.hazards`` prints the observed table.
"""

import copy
import dataclasses
import functools
import itertools
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from lib.front_ends import LOOP, MANAGERS, TRACED, WIDTH, WITH_CONTEXT, WRAPPERS
from lib.hazards import (
    ABSENT,
    DOCUMENTED,
    RIGHT,
    Refused,
    Row,
    Scene,
    in_another_thread,
    in_threads,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import cgcompile
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    DispatchError,
    HostValueChangedError,
    LoopStateError,
)
from cgcompile.reasons import Reason

KEEP = ("keep", "keep, context")
UNTRACED = (*WRAPPERS, *MANAGERS, LOOP, "breakable, context")  # capture Python as it runs
TRACES = (*TRACED, *(f"{name}, context" for name in TRACED))
NONE = ("none", "none, context")
SHAPE = ("shape", "shape, context")
TORCH = ("torch.compile", "torch.compile, context")
GUARDED = TORCH + KEEP
UNGUARDED = SHAPE + NONE  # traces without the guards of Dynamo on the model
ENCODER = ("EncoderCudaGraphManager",)
# Capture no step in mode FULL whose boundary no FULL graph may hold.
BREAK_FULL = ("breakable, context", "BreakableCUDAGraphWrapper", "CudaGraphManager")

# State that Python reads: Dynamo's guards see it, dropped guards are a documented exception, and
# what captures Python as it runs must compare it.
OF_STATE = {UNGUARDED: DOCUMENTED, UNTRACED: HostValueChangedError}
# Hooks that are added below a model are not compared by torch.compile itself.
OF_STATE_NOT_IN_TORCH = {**OF_STATE, TORCH: DOCUMENTED}
# Dynamo has no guard on it.
OF_STATE_NOT_IN_DYNAMO = {**OF_STATE, GUARDED: DOCUMENTED}
# What chooses a kernel, or is a default of torch, is baked into every graph.
OF_SETTINGS = {UNTRACED: HostValueChangedError}
# Which modules and tensors a model has.
OF_STRUCTURE = {UNGUARDED: DOCUMENTED, UNTRACED: AddressChangedError}
# A manager passes no other arguments than its buffers.
OF_TENSORS = {UNTRACED: AddressChangedError, MANAGERS: ABSENT}  # of arguments
OF_ARGUMENTS = {UNTRACED: HostValueChangedError, MANAGERS: ABSENT}
OF_WEIGHTS = {NONE: DOCUMENTED, UNTRACED: AddressChangedError}
OF_LAYOUTS = {NONE: DOCUMENTED, UNTRACED: HostValueChangedError}  # at the same address
# torch 2.11 skips guards on tensors in dicts that were not written. Inputs that are copied are right.
OF_LAYOUTS_IN_DICTS, OF_LAYOUTS_OF_INPUTS = OF_LAYOUTS, OF_LAYOUTS
if torch.__version__ < "2.12":
    OF_LAYOUTS_IN_DICTS = {TRACES: DOCUMENTED, **OF_LAYOUTS}
    OF_LAYOUTS_OF_INPUTS = {WITH_CONTEXT: DOCUMENTED, **OF_LAYOUTS}

READ_CONTEXT = (*WITH_CONTEXT, *WRAPPERS, LOOP, "CudaGraphManager")

# A forward context is never passed to an encoder, and a front end without one has no metadata.
NO_METADATA = {("torch.compile", "keep", "shape", "none", "breakable", *ENCODER): ABSENT}

NUMBERS: dict[str, Any] = {}  # globals that models read


class Model(nn.Module):
    """A frozen linear layer whose result ``read`` scales; subclasses say what that reads."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.linear(x))


# ------------------------------------------------------------------ plain values of the model


class Attributes(Model):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.number, self.flag, self.kind = 2.0, True, "double"
        self.table, self.items = {"k": 2.0}, [2.0, 3.0]
        self.helper = types.SimpleNamespace(scale=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.number * self.table["k"] * self.items[0] * self.helper.scale
        x = x + 1 if self.flag else x - 1
        return x * 2 if self.kind == "double" else x / 2


def _attribute(change: Callable[[Attributes], None]) -> Callable[[str], Scene]:
    def build(device: str) -> Scene:
        model = Attributes(device)
        return Scene(model, lambda: change(model))

    return build


def _set(name: str, value: Any) -> Callable[[str], Scene]:
    return _attribute(lambda model: setattr(model, name, value))


def _hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


def hook_added(device: str) -> Scene:
    model = Model(device)
    return Scene(model, lambda: model.linear.register_forward_hook(_hook) and None)


def hook_removed(device: str) -> Scene:
    model = Model(device)
    handle = model.linear.register_forward_hook(_hook)
    return Scene(model, handle.remove)


def hook_of_the_model(device: str) -> Scene:
    model = Model(device)
    return Scene(model, lambda: model.register_forward_hook(_hook) and None)


def forward_replaced(device: str) -> Scene:
    model = Model(device)
    before = model.forward
    return Scene(model, lambda: setattr(model, "forward", lambda x: 3 * before(x)))


def forward_becomes_a_partial(device: str) -> Scene:
    """As hooks of accelerate do."""
    model = Model(device)
    before = model.forward
    new = functools.partial(lambda module, x: 3 * before(x), model)
    return Scene(model, lambda: setattr(model, "forward", functools.update_wrapper(new, before)))


def forward_of_the_class_replaced(device: str) -> Scene:
    class Own(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    replaced = lambda self, x: 3 * self.linear(x)  # noqa: E731
    return Scene(Own(device), lambda: setattr(Own, "forward", replaced))


def forward_of_a_layer_replaced(device: str) -> Scene:
    model = Model(device)
    before = model.linear.forward
    return Scene(model, lambda: setattr(model.linear, "forward", lambda x: 3 * before(x)))


def training_mode(device: str) -> Scene:
    class Mode(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.training else x * 3

    model = Mode(device).eval()
    return Scene(model, lambda: model.train() and None)


def closure_cell(device: str) -> Scene:
    model, scale = Model(device), 2.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 3.0

    model.read = scaled
    return Scene(model, change)


def global_number(device: str) -> Scene:
    class Global(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * NUMBERS["scale"]

    NUMBERS["scale"] = 2.0
    return Scene(Global(device), lambda: NUMBERS.update(scale=3.0), NUMBERS.clear)


def attribute_of_a_nested_class(device: str) -> Scene:
    class Nested(Model):
        class Config:
            scale = 2.0

        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.Config.scale

    return Scene(Nested(device), lambda: setattr(Nested.Config, "scale", 3.0))


def _method_of_the_class(kind: Any) -> Callable[[str], Scene]:
    """Make a row of a ``staticmethod`` or ``classmethod`` that is replaced."""

    def build(device: str) -> Scene:
        class Own(Model):
            scaled = kind(lambda *args: args[-1] * 2)

            def read(self, x: torch.Tensor) -> torch.Tensor:
                return self.scaled(x)

        return Scene(Own(device), lambda: setattr(Own, "scaled", kind(lambda *args: args[-1] * 3)))

    return build


def _numbers_from(number: float) -> Iterator[float]:
    while True:
        yield number
        number += 1


def _started(numbers: Iterator[float]) -> Iterator[float]:
    next(numbers)
    return numbers


def _next_of(iterator: Any) -> float:
    """Return what an iterator returns next, or a generator returned last; it stays where it is."""
    if isinstance(iterator, types.GeneratorType):
        return iterator.gi_frame.f_locals["number"]
    following = next(copy.deepcopy(iterator))
    return following if isinstance(following, (int, float)) else following[0]


ITERATORS: dict[str, Callable[[], Any]] = {
    "count": lambda: itertools.count(2),
    "list": lambda: iter([2.0, 3.0, 4.0]),
    "range": lambda: iter(range(2, 9)),
    "enumerate": lambda: enumerate("abc", 2),
    "generator": lambda: _started(_numbers_from(2.0)),
}


def _read_by_an_op(make: Callable[[], Any], take: Any, change: Any) -> Callable[[str], Scene]:
    """Make a row of what a registered op reads while it runs: Dynamo does not look into it."""

    def build(device: str) -> Scene:
        held = make()
        before = take(held)
        NUMBERS["chosen"] = lambda: take(held) == before
        return Scene(RunsKernel(device), lambda: change(held) and None, NUMBERS.clear)

    return build


def _of_a_function(function: Any) -> Callable[[str], Scene]:
    """Make a row of an attribute of a function of this file, which the model reads."""

    def build(device: str) -> Scene:
        class Own(Model):
            def read(self, x: torch.Tensor) -> torch.Tensor:
                return x * function.scale

        function.scale = 2.0
        return Scene(Own(device), lambda: setattr(function, "scale", 3.0))

    return build


def _with_an_attribute() -> None:
    return None


class Stored:
    """A descriptor with a value of its own."""

    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


def value_of_a_descriptor(device: str) -> Scene:
    class Own(Model):
        scale = Stored()

        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return Scene(Own(device), lambda: setattr(vars(Own)["scale"], "value", 3.0))


def attribute_of_a_metaclass(device: str) -> Scene:
    class Meta(type):
        scale = 2.0

    class Config(metaclass=Meta):
        pass

    class Own(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * Config.scale

    return Scene(Own(device), lambda: setattr(Meta, "scale", 3.0))


def cleared_cache(device: str) -> Scene:
    """A function behind ``lru_cache`` reads a number; the cache is emptied with the change."""
    numbers = {"scale": 2.0}

    @functools.lru_cache
    def scale() -> float:
        return numbers["scale"]

    class Own(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale()

    def change() -> None:
        numbers["scale"] = 3.0
        scale.cache_clear()

    scale()  # before any capture
    return Scene(Own(device), change)


def tensor_by_a_computed_name(device: str) -> Scene:
    """A name that no code has: only the memory that was touched is held."""

    class Own(Model):
        def __init__(self) -> None:
            super().__init__(device)
            self.helper = types.SimpleNamespace(tensor=torch.rand(WIDTH, device=device) + 1)

        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * getattr(self.helper, "".join(("ten", "sor")))

    model = Own()
    return Scene(model, lambda: setattr(model.helper, "tensor", model.helper.tensor + 1))


def function_of_torch_replaced(device: str) -> Scene:
    class Own(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return F.softsign(x)

    before = F.softsign
    change = lambda: setattr(F, "softsign", lambda x: x * 3)  # noqa: E731
    return Scene(Own(device), change, lambda: setattr(F, "softsign", before))


def generated_forward_replaced(device: str) -> Scene:
    """A module of ``torch.fx`` gets other code."""
    model = torch.fx.symbolic_trace(Model(device))

    def change() -> None:
        (output,) = model.graph.find_nodes(op="output")
        with model.graph.inserting_before(output):
            output.args = (model.graph.call_function(torch.mul, (output.args[0], 3.0)),)
        model.recompile()

    return Scene(model, change)


class Helper:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def helper_of_two_layers(device: str) -> Scene:
    """Two layers share an object; one of them gets another."""

    class Layer(nn.Module):
        def __init__(self, helper: Helper) -> None:
            super().__init__()
            self.helper = helper

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.helper.scale

    model, helper = Model(device), Helper(2.0)
    model.one, model.two = Layer(helper), Layer(helper)
    model.read = lambda x: model.two(model.one(x))
    return Scene(model, lambda: setattr(model.two, "helper", Helper(5.0)))


class Kept(Model):
    """Holds one thing, which ``take`` applies."""

    def __init__(self, device: str, held: Any, take: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(device)
        self.held, self.take = held, take

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.held, x)


def _held(
    make: Callable[[], Any],
    take: Callable[[Any, torch.Tensor], Any],
    change: Callable[[Any], Any],
) -> Callable[[str], Scene]:
    """Make a row of something that a model holds and that changes in place."""

    def build(device: str) -> Scene:
        model = Kept(device, make(), take)
        return Scene(model, lambda: change(model.held) and None)

    return build


def _attribute_of_a_weight(device: str) -> Scene:
    model = Model(device)
    model.linear.weight.scale = 2.0
    model.read = lambda x: x * model.linear.weight.scale
    return Scene(model, lambda: setattr(model.linear.weight, "scale", 3.0))


def attribute_of_a_tensor(device: str) -> Scene:
    model = Model(device)
    model.table = torch.rand(WIDTH, device=device)
    model.table.scale = 2.0
    model.read = lambda x: x * model.table * model.table.scale
    return Scene(model, lambda: setattr(model.table, "scale", 3.0))


class _Layers(nn.Sequential):
    """A subclass of a container of torch."""


def buffer_added(device: str) -> Scene:
    class Optional(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.late if hasattr(self, "late") else x

    model = Optional(device)
    late = torch.full((WIDTH,), 3.0, device=device)
    return Scene(model, lambda: model.register_buffer("late", late))


def parameter_added_to_a_list(device: str) -> Scene:
    class Sums(Model):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            self.items = nn.ParameterList([torch.ones(WIDTH, device=device)])
            self.items.requires_grad_(False)

        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(self.items)

    model = Sums(device)
    late = nn.Parameter(torch.full((WIDTH,), 3.0, device=device), requires_grad=False)
    return Scene(model, lambda: model.items.append(late) and None)


def globals_of_a_module_as_a_dict(device: str) -> Scene:
    space = types.ModuleType("settings_of_the_table").__dict__
    space["scale"] = 2.0

    class Reads(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * space["scale"]

    return Scene(Reads(device), lambda: space.update(scale=3.0))


def another_table_of_parameters(device: str) -> Scene:
    model = Model(device)
    other = Model(device).linear
    return Scene(model, lambda: setattr(model.linear, "_parameters", dict(other._parameters)))


class Optional(Model):
    """Reads what its layer may have, and scales by a buffer."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0, device=device))

    def read(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale * getattr(self, "factor", 1.0)
        return x if getattr(self.linear, "late", None) is None else x * self.linear.late


def _optional(change: Callable[[Any], Any]) -> Callable[[str], Scene]:
    """Make a row of a change of an ``Optional``, whose class is made anew."""

    def build(device: str) -> Scene:
        class Own(Optional):
            pass

        model = Own(device)
        return Scene(model, lambda: change(model) and None)

    return build


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 0.5)


def attribute_of_the_class_of_a_layer(device: str) -> Scene:
    model = Model(device)
    other = _other(model.linear.weight)

    def undo() -> None:
        if "weight" in vars(nn.Linear):
            del nn.Linear.weight

    return Scene(model, lambda: setattr(nn.Linear, "weight", other), undo)


def class_of_a_layer(device: str) -> Scene:
    model = Model(device)
    return Scene(model, lambda: setattr(model.linear, "__class__", Doubled))


def _with_other_attributes(module: nn.Module, **names: Any) -> None:
    module.__dict__ = {**module.__dict__, **names}


def _in_turn(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        x = layer(x)
    return x


# ------------------------------------------------------------------ settings of the process


class RunsKernel(Model):
    """Runs an op that chooses its kernel by what ``NUMBERS["chosen"]`` reads, as SDPA does."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hazards.kernel(x)


def _kernel(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if NUMBERS["chosen"]() else x * 3


def _setting(
    read: Callable[[], bool], put: Callable[[bool], None], before: bool, now: bool
) -> Callable[[str], Scene]:
    """Make a row of a setting that the model reads; ``put`` sets it."""

    def build(device: str) -> Scene:
        previous = read()
        put(before)
        NUMBERS["chosen"] = read
        return Scene(RunsKernel(device), lambda: put(now), lambda: put(previous))

    return build


def default_dtype(device: str) -> Scene:
    class Makes(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.full((WIDTH,), 2.0, device=x.device)

    previous = torch.get_default_dtype()
    change = lambda: torch.set_default_dtype(torch.float64)  # noqa: E731
    return Scene(Makes(device), change, lambda: torch.set_default_dtype(previous))


def default_device(device: str) -> Scene:
    class Reads(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.ones(1).device.type == "meta" else x * 3

    change = lambda: torch.set_default_device("meta")  # noqa: E731
    return Scene(Reads(device), change, lambda: torch.set_default_device(None))


class Doubling(TorchFunctionMode):
    """Doubles what ``relu`` returns."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.relu else result


class DoublingOps(TorchDispatchMode):
    """Doubles what the op of ``relu`` returns."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.relu.default else result


def _around(enter: Callable[[], Any], model: Callable[[str], nn.Module]) -> Callable[[str], Scene]:
    """Make a row of a context manager that is around each call after the change."""

    def build(device: str) -> Scene:
        changed = []

        @contextmanager
        def around() -> Any:
            with ExitStack() as stack:
                if changed:
                    stack.enter_context(enter())
                yield

        return Scene(model(device), lambda: changed.append(True), around=around)

    return build


class Relu(Model):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)


def _autocast(now: torch.dtype | None, before: torch.dtype | None = None) -> Callable[[str], Scene]:
    """Make a row of autocast, which is off where there is no dtype."""

    def build(device: str) -> Scene:
        changed: list[bool] = []

        def around() -> Any:
            dtype = now if changed else before
            return torch.autocast(device, dtype, enabled=dtype is not None)

        return Scene(Model(device), lambda: changed.append(True), around=around)

    return build


def sdpa_kernel(device: str) -> Scene:
    NUMBERS["chosen"] = torch.backends.cuda.flash_sdp_enabled
    math = torch.nn.attention.SDPBackend.MATH
    return _around(lambda: torch.nn.attention.sdpa_kernel(math), RunsKernel)(device)


def priority_of_kernels(device: str) -> Scene:
    """All kernels stay enabled; another one is the first choice."""
    kinds = torch.nn.attention.SDPBackend
    order = [kinds.MATH, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.CUDNN_ATTENTION]
    usual = torch._C._get_sdp_priority_order()
    NUMBERS["chosen"] = lambda: torch._C._get_sdp_priority_order() == usual
    enter = lambda: torch.nn.attention.sdpa_kernel(order, set_priority=True)  # noqa: E731
    return _around(enter, RunsKernel)(device)


def number_in_the_body_of_an_op(device: str) -> Scene:
    """A registered op reads a global while it runs: Dynamo does not look into it."""
    NUMBERS["chosen"], NUMBERS["flag"] = lambda: NUMBERS["flag"], True
    return Scene(RunsKernel(device), lambda: NUMBERS.update(flag=False), NUMBERS.clear)


# ------------------------------------------------------------------ tensors behind the model


class Holder:
    """A plain object that holds a tensor, and a method that reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.tensor


def _clear(kept: list[torch.Tensor]) -> None:
    kept.clear()
    NUMBERS.clear()


@torch.library.custom_op("hazards::times_table", mutates_args=())
def times_table(x: torch.Tensor) -> torch.Tensor:
    return x * NUMBERS["table"]


times_table.register_fake(torch.empty_like)


def _tensor(holder_kind: str, how: str) -> Callable[[str], Scene]:
    """Make a row of a tensor that is replaced and then alive or freed, or that has other strides."""

    def build(device: str) -> Scene:
        model = Model(device)
        scale = torch.rand(WIDTH, device=device) + 1
        kept = [scale] if how == "alive" else []
        fresh = lambda: torch.full((WIDTH,), 5.0, device=device)  # noqa: E731
        undo = lambda: _clear(kept)  # noqa: E731

        if holder_kind == "attribute":
            model.scale = scale
            model.read = lambda x: x * model.scale
            change = lambda: setattr(model, "scale", fresh())  # noqa: E731
        elif holder_kind == "list":
            model.items = [scale]
            model.read = lambda x: x * model.items[0]
            change = lambda: model.items.__setitem__(0, fresh())  # noqa: E731
        elif holder_kind == "dict":
            model.table = {"scale": scale}
            model.read = lambda x: x * model.table["scale"]
            change = lambda: model.table.update(scale=fresh())  # noqa: E731
        elif holder_kind == "deque":
            model.items = deque([scale])
            model.read = lambda x: x * model.items[0]
            change = lambda: model.items.append(model.items.popleft() + 5)  # noqa: E731
        elif holder_kind == "subclass":
            model.items = [TwoTensor(scale, scale)]
            model.read = lambda x: x * model.items[0].a
            change = lambda: model.items.__setitem__(0, TwoTensor(fresh(), fresh()))  # noqa: E731
        elif holder_kind == "plain object":
            model.holder = Holder(scale)
            model.read = lambda x: x * model.holder.tensor
            change = lambda: setattr(model.holder, "tensor", fresh())  # noqa: E731
        elif holder_kind == "owner of a bound method":
            holder = Holder(scale)
            model.read = holder.scaled
            change = lambda: setattr(holder, "tensor", fresh())  # noqa: E731
        elif holder_kind == "global":
            NUMBERS["tensor"] = scale
            model.read = lambda x: x * NUMBERS["tensor"]
            change = lambda: NUMBERS.update(tensor=fresh())  # noqa: E731
        elif holder_kind == "custom op":
            NUMBERS["table"] = scale
            model.read = torch.ops.hazards.times_table
            change = lambda: NUMBERS.update(table=fresh())  # noqa: E731
        else:
            model.read, change = _closure(scale, fresh)
        if how == "strides":
            change = lambda: _expand(scale)  # noqa: E731
        return Scene(model, change, undo)

    return build


def _expand(scale: torch.Tensor) -> None:
    """Give a vector a stride of zero, at the same address."""
    scale.data = scale.data[:1].expand(WIDTH)


def _closure(scale: torch.Tensor, fresh: Callable[[], torch.Tensor]) -> Any:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = fresh()

    return scaled, change


PLACES = (
    "list",
    "dict",
    "deque",
    "subclass",
    "plain object",
    "owner of a bound method",
    "closure",
    "global",
)


# What a model holds that is no module, made of a layer; and what runs the layer in it.
HELPERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "an object": (lambda layer: types.SimpleNamespace(layer=layer), lambda held, x: held.layer(x)),
    "a list": (lambda layer: [layer], lambda held, x: held[0](x)),
    "a dict": (lambda layer: {"layer": layer}, lambda held, x: held["layer"](x)),
    "a partial": (lambda layer: functools.partial(layer), lambda held, x: held(x)),
    "a closure": (lambda layer: lambda x: layer(x), lambda held, x: held(x)),
    "a container in a list": (lambda layer: [nn.Sequential(layer)], lambda held, x: held[0](x)),
    "a global": (lambda layer: None, lambda held, x: NUMBERS["layer"](x)),
}


def _layer_in(kind: str, change: Callable[[nn.Module, nn.Module], bool]) -> Callable[[str], Scene]:
    """Make a row of a layer in one of ``HELPERS``; it is replaced if ``change(layer, other)``."""
    make, take = HELPERS[kind]

    def build(device: str) -> Scene:
        layer, other = (
            nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False) for _ in range(2)
        )
        if kind == "a global":
            layer = NUMBERS.setdefault("layer", layer)  # eager reads the same one
        model = Kept(device, make(layer), take)

        def replace() -> None:
            if change(layer, other):
                model.held, NUMBERS["layer"] = make(other), other

        return Scene(model, replace, NUMBERS.clear)

    return build


def _with_the_same_weights(layer: nn.Module, other: nn.Module) -> bool:
    other.weight, other.bias = layer.weight, layer.bias
    return True


def _gets_another_weight(layer: nn.Module, other: nn.Module) -> bool:
    layer.weight = other.weight
    return False


def cache_in_a_list(device: str) -> Scene:
    """A new request has a new cache, which each step writes."""

    class Decoder(Model):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            self.reset()

        def reset(self) -> None:
            self.caches = [torch.zeros(WIDTH, device=self.linear.weight.device)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.caches[0] += self.linear(x).sum(0)
            return x + self.caches[0]

    model = Decoder(device)
    return Scene(model, model.reset, state=lambda: [model.caches[0].clone()])


# ------------------------------------------------------------------ parameters and buffers


def _weights(change: Callable[[Model], None]) -> Callable[[str], Scene]:
    def build(device: str) -> Scene:
        model = Model(device)
        kept = list(model.parameters())  # alive, so that replaced ones are told by what they are
        return Scene(model, lambda: change(model), kept.clear)

    return build


def _new_weight(model: Model) -> torch.Tensor:
    return torch.full_like(model.linear.weight, 0.5)


def weight_replaced(model: Model) -> None:
    model.linear.weight = nn.Parameter(_new_weight(model), requires_grad=False)


def weight_data(model: Model) -> None:
    model.linear.weight.data = _new_weight(model)


def weight_in_place(model: Model) -> None:
    with torch.no_grad():
        model.linear.weight.fill_(0.5)


def layer_replaced(model: Model) -> None:
    device = str(model.linear.weight.device)
    model.linear = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)
    with torch.no_grad():
        model.linear.weight.fill_(0.5)
        model.linear.bias.fill_(0.25)


def weight_transposed(model: Model) -> None:
    model.linear.weight.data = model.linear.weight.data.t()


def last_weight_data(model: Model) -> None:
    model.linear.bias.data = torch.full_like(model.linear.bias, 0.5)


def weights_assigned(model: Model) -> None:
    state = {name: torch.full_like(weight, 0.5) for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False)


def weights_updated(model: Model) -> None:
    state = {name: weight * 0.5 for name, weight in model.state_dict().items()}
    cgcompile.update_weights(model, state)


def bias_removed(model: Model) -> None:
    model.linear.bias = None


class Doubled(nn.Linear):
    """A linear layer of another class, over the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def layer_of_another_class(model: Model) -> None:
    before = model.linear
    model.linear = Doubled(WIDTH, WIDTH, device=before.weight.device)
    model.linear.weight, model.linear.bias = before.weight, before.bias


class OfAnyLayout(nn.Module):
    """Reads a parameter of any shape and dtype."""

    def __init__(self, device: str) -> None:
        super().__init__()
        weight = torch.rand(2, WIDTH, device=device, dtype=torch.float16)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.float().sum(0).max()


def _of_any_layout(*view: Any) -> Callable[[str], Scene]:
    def build(device: str) -> Scene:
        model = OfAnyLayout(device)
        return Scene(model, lambda: setattr(model.weight, "data", model.weight.data.view(*view)))

    return build


class Promotes(nn.Module):
    """Computes in the larger dtype of its input and its weight."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH, device=device) + 1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def module_of_another_dtype(device: str) -> Scene:
    model = Promotes(device)
    return Scene(model, lambda: model.to(torch.bfloat16) and None)


class WithBuffer(Model):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0, device=device))
        self.register_buffer("shift", None)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if self.shift is None else x * self.scale + self.shift


def _buffer(name: str) -> Callable[[str], Scene]:
    def build(device: str) -> Scene:
        model = WithBuffer(device)
        return Scene(model, lambda: setattr(model, name, torch.full_like(model.scale, 5.0)))

    return build


class AroundBoundary(nn.Module):
    """Reads one weight before a boundary, and another one after it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, device=device)
        self.after = nn.Linear(WIDTH, WIDTH, device=device)
        self.requires_grad_(False)
        NUMBERS["chosen"] = lambda: True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.ops.hazards.kernel(self.before(x)))


def _around_boundary(change: Callable[[torch.Tensor], None], layer: str) -> Callable[[str], Scene]:
    def build(device: str) -> Scene:
        model = AroundBoundary(device)
        return Scene(model, lambda: change(getattr(model, layer).weight))

    return build


def _new_data(weight: torch.Tensor) -> None:
    weight.data = torch.full_like(weight, 0.5)


def data_in_the_step(device: str) -> Scene:
    """The step assigns ``.data`` of its weight: no graph can hold that."""

    class Decays(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data = self.linear.weight * 0.5
            return self.linear(x)

    model = Decays(device)
    return Scene(model, state=lambda: [model.linear.weight.clone()])


def scalar_of_the_host(device: str) -> Scene:
    """A tensor of the CPU without dimensions, changed in place."""
    model = Model(device)
    model.scale = torch.tensor(2.0)
    model.read = lambda x: x * model.scale
    return Scene(model, lambda: model.scale.fill_(3.0) and None)


def parameter_of_the_host(device: str) -> Scene:
    """A parameter of the CPU without dimensions, changed in place."""
    model = Model(device)
    model.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
    model.read = lambda x: x * model.scale
    return Scene(model, lambda: model.scale.fill_(3.0) and None)


def made_in_the_first_step(device: str) -> Scene:
    """The first step makes what all steps read."""

    class Lazy(Model):
        def read(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table"):
                self.table = torch.arange(WIDTH, dtype=x.dtype, device=x.device)
            return x + self.table

    return Scene(Lazy(device))


# ------------------------------------------------------------------ the forward context


def take(metadata: Any) -> Any:
    """Return what the op of a row reads."""
    return NUMBERS["take"](metadata)


def _scale(x: torch.Tensor) -> torch.Tensor:
    return x * take(cgcompile.get_forward_context().attn_metadata)


@cache
def library() -> torch.library.Library:
    """Define the ops of these models, once: ``torch.ops`` keeps them for the whole process."""
    lib = torch.library.Library("hazards", "FRAGMENT")
    for name, function in (("scale", _scale), ("kernel", _kernel)):
        lib.define(f"{name}(Tensor x) -> Tensor")
        for key in ("CPU", "CUDA"):
            lib.impl(name, function, key)
        torch.library.register_fake(f"hazards::{name}", torch.empty_like, lib=lib)
    return lib


class ReadsContext(Model):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hazards.scale(x)


# The op is declared safe inside of a graph, which the rows then contradict.
WITH_OP = {
    "splitting_ops": (
        cgcompile.SplittingOp("hazards::scale", support=cgcompile.AttentionCGSupport.ALWAYS),
    )
}


def _metadata(
    read: Callable[[Any], Any],
    before: Callable[[torch.Tensor], Any],
    now: Callable[[torch.Tensor], Any],
) -> Callable[[str], Scene]:
    """Make a row of metadata, which ``before`` and ``now`` make of one tensor, f32[WIDTH]."""

    def build(device: str) -> Scene:
        NUMBERS["take"] = read
        tensor = torch.rand(WIDTH, device=device) + 1
        current = [before(tensor)]

        def change() -> None:
            current[0] = now(tensor)

        return Scene(ReadsContext(device), change, metadata=lambda: current[0])

    return build


def _nested(value: Any) -> dict[str, Any]:
    for key in "edcba":
        value = {key: value}
    return value


def _shared(value: Any, other: Any = None) -> dict[str, Any]:
    layer = {"k": value}
    return {"a": layer, "b": layer if other is None else {"k": other}}


def _cycle(value: Any, inner: Any = None) -> dict[str, Any]:
    outer = {"k": value}
    outer["m"] = outer if inner is None else inner
    return outer


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    tensor.factor = factor
    return tensor


class Scaling:
    """Metadata whose class has the number."""

    scale = 2.0


def _scaling(scale: float) -> Scaling:
    Scaling.scale = scale
    return Scaling()


def _captured(value: Any) -> Callable[[], Any]:
    return lambda: value


# ------------------------------------------------------------------ inputs


def _inputs(*strides: tuple[int, ...]) -> Callable[[str], Scene]:
    """Make a row of inputs, f32[4, WIDTH], of these strides in turn; the last after the change."""

    def build(device: str) -> Scene:
        left = list(strides[:-1])

        def inputs(device: str) -> torch.Tensor:
            memory = torch.randn(1024, device=device)
            return memory.as_strided((4, WIDTH), left.pop(0) if len(left) > 1 else left[0])

        def change() -> None:
            left[:] = strides[-1:]

        return Scene(Model(device), change, inputs=inputs)

    return build


@dataclasses.dataclass
class Options:
    scale: Any
    flag: bool = True


class Takes(Model):
    """Takes a second argument, of which ``take`` makes a factor."""

    def __init__(self, device: str, take: Callable[[Any], Any]) -> None:
        super().__init__(device)
        self.take = take

    def forward(self, x: torch.Tensor, argument: Any) -> torch.Tensor:
        return self.linear(x) * self.take(argument)


def _argument(
    before: Callable[[torch.Tensor], Any],
    now: Callable[[torch.Tensor], Any],
    read: Callable[[Any], Any] = lambda argument: argument,
) -> Callable[[str], Scene]:
    """Make a row of an argument, which ``before`` and ``now`` make of one tensor, f32[WIDTH]."""

    def build(device: str) -> Scene:
        tensor, make = torch.rand(WIDTH, device=device) + 1, [before]

        def call(step: Callable[..., Any], x: torch.Tensor) -> Any:
            return step(x, make[0](tensor))

        return Scene(Takes(device, read), lambda: make.insert(0, now), call=call)

    return build


def scalar_argument(device: str) -> Scene:
    """An argument that is a tensor of the CPU without dimensions, replaced."""
    scalars = [torch.tensor(2.0)]
    return Scene(
        Takes(device, lambda argument: argument),
        lambda: scalars.append(torch.tensor(3.0)),
        call=lambda step, x: step(x, scalars[-1]),
    )


def argument_needs_gradients(device: str) -> Scene:
    """Grad mode is on, and an argument needs gradients after the change."""
    scale = torch.rand(WIDTH, device=device)

    def call(step: Callable[..., Any], x: torch.Tensor) -> Any:
        return step(x, scale)

    model = Takes(device, lambda argument: argument)
    return Scene(model, lambda: scale.requires_grad_() is None, call=call)


def field_of_an_argument(name: str, value: Any) -> Callable[[str], Scene]:
    """Make a row of an object that is passed to each call, and changed."""

    def build(device: str) -> Scene:
        options = Options(torch.full((WIDTH,), 2.0, device=device))
        return Scene(
            Takes(device, lambda options: options.scale if options.flag else options.scale * 3),
            lambda: setattr(options, name, value(options)),
            call=lambda step, x: step(x, options),
        )

    return build


def subclass_in_a_field(device: str) -> Scene:
    """An argument holds a tensor subclass, which is replaced by one of other tensors."""
    scale = torch.full((WIDTH,), 2.0, device=device)
    options = Options(TwoTensor(scale, scale))
    return Scene(
        Takes(device, lambda options: options.scale.a),
        lambda: setattr(options, "scale", TwoTensor(scale * 2, scale)),
        call=lambda step, x: step(x, options),
    )


def input_moves(device: str) -> Scene:
    """Each call has an input at another address, without a copy into a buffer."""
    kept: list[torch.Tensor] = []

    def inputs(device: str) -> torch.Tensor:
        kept.append(torch.randn(4, WIDTH, device=device))
        return kept[-1]

    return Scene(Model(device), undo=kept.clear, inputs=inputs)


def second_thread(device: str) -> Scene:
    """Calls come from another thread after the change."""
    changed: list[bool] = []

    def call(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
        return in_another_thread(step, x) if changed else step(x)

    return Scene(Model(device), lambda: changed.append(True), call=call)


def threads_at_once(device: str) -> Scene:
    """Two threads call at once after the change."""
    changed: list[bool] = []

    def call(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
        if not changed:
            return step(x)
        return torch.cat(in_threads([lambda: step(x), lambda: step(x * 2)]))

    return Scene(Model(device), lambda: changed.append(True), call=call)


def forward_without_gradients(device: str) -> Scene:
    """Grad mode is on, and the model turns it off."""

    class WithoutGradients(Model):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    return Scene(WithoutGradients(device).requires_grad_())


def weights_need_gradients(device: str) -> Scene:
    """Grad mode is on, and the weights need gradients after the change."""
    model = Model(device)
    return Scene(model, lambda: model.requires_grad_() and None)


def _trained(device: str) -> nn.Module:
    return Model(device).requires_grad_()


# ------------------------------------------------------------------ the rows

TABLE: tuple[Row, ...] = (
    Row("float attribute", _set("number", 3.0), OF_STATE),
    Row("bool attribute", _set("flag", False), OF_STATE),
    Row("string attribute", _set("kind", "half"), OF_STATE),
    Row("item of a dict", _attribute(lambda model: model.table.update(k=3.0)), OF_STATE),
    Row(
        "item of a list",
        _attribute(lambda model: model.items.__setitem__(0, 3.0)),
        OF_STATE,
    ),
    Row(
        "field of a helper object",
        _attribute(lambda model: setattr(model.helper, "scale", 3.0)),
        OF_STATE,
    ),
    Row("hook added", hook_added, OF_STATE_NOT_IN_TORCH),
    Row("hook removed", hook_removed, OF_STATE),
    Row("hook of the model added", hook_of_the_model, {UNTRACED: HostValueChangedError}),
    Row("forward replaced", forward_replaced, {UNTRACED: HostValueChangedError}),
    Row(
        "forward replaced by a partial",
        forward_becomes_a_partial,
        {UNTRACED: HostValueChangedError},
    ),
    Row(
        "forward of the class replaced",
        forward_of_the_class_replaced,
        {UNTRACED: HostValueChangedError},
    ),
    Row("forward of a layer replaced", forward_of_a_layer_replaced, OF_STATE),
    Row("training mode", training_mode, OF_STATE),
    Row("closure cell", closure_cell, OF_STATE),
    Row("global", global_number, OF_STATE),
    Row(
        "attribute of a nested class",
        attribute_of_a_nested_class,
        OF_STATE if torch.__version__ >= "2.12" else OF_STATE_NOT_IN_DYNAMO,
    ),
    Row("static method replaced", _method_of_the_class(staticmethod), OF_STATE),
    Row("class method replaced", _method_of_the_class(classmethod), OF_STATE_NOT_IN_DYNAMO),
    Row("value of a descriptor", value_of_a_descriptor, OF_STATE),
    Row("attribute of a metaclass", attribute_of_a_metaclass, OF_STATE_NOT_IN_DYNAMO),
    *(
        Row(
            f"iterator moves on, {kind}",
            _read_by_an_op(make, _next_of, next),
            {TRACES: DOCUMENTED, UNTRACED: HostValueChangedError},
        )
        for kind, make in ITERATORS.items()
    ),
    Row(
        "random.Random draws a number",
        _read_by_an_op(
            lambda: random.Random(0),
            lambda held: held.getstate()[1][-1],
            lambda held: held.random(),
        ),
        {TRACES: DOCUMENTED, UNTRACED: HostValueChangedError},
    ),
    Row("attribute of a function", _of_a_function(_with_an_attribute), OF_STATE),
    Row("lru_cache cleared", cleared_cache, OF_STATE),
    Row("function of torch replaced", function_of_torch_replaced, OF_STATE),
    Row(
        "forward of torch.fx replaced",
        generated_forward_replaced,
        {UNTRACED: HostValueChangedError},
    ),
    Row("helper that two layers share", helper_of_two_layers, OF_STATE),
    Row("attribute of a weight", _attribute_of_a_weight, OF_STATE),
    Row("attribute of a tensor", attribute_of_a_tensor, OF_STATE),
    Row(
        "named item added to a dict",
        _held(
            dict, lambda held, x: x * held.get("scale", 2.0), lambda held: held.update(scale=3.0)
        ),
        OF_STATE,
    ),
    Row(
        "keyword argument added",
        _held(
            dict,
            lambda held, x: F.leaky_relu(x, **held),
            lambda held: held.update(negative_slope=3.0),
        ),
        OF_STATE,
    ),
    Row(
        "item added to a dict that is iterated",
        _held(
            lambda: {1: 2.0},
            lambda held, x: x * sum(held.values()),
            lambda held: held.update({2: 3.0}),
        ),
        OF_STATE,
    ),
    Row(
        "order of a dict that is iterated",
        _held(
            lambda: {"a": 2.0, "b": 3.0},
            lambda held, x: functools.reduce(lambda y, value: (y + 1) * value, held.values(), x),
            lambda held: held.update(a=held.pop("a")),
        ),
        OF_STATE,
    ),
    Row(
        "layer appended to a Sequential",
        _held(
            lambda: nn.Sequential(nn.Tanh()),
            lambda held, x: held(x),
            lambda held: held.append(nn.Sigmoid()),
        ),
        OF_STATE,
    ),
    Row(
        "layer appended to a ModuleList",
        _held(lambda: nn.ModuleList([nn.Tanh()]), _in_turn, lambda held: held.append(nn.Sigmoid())),
        OF_STATE,
    ),
    Row("buffer added", buffer_added, OF_STATE),
    Row("parameter added to a ParameterList", parameter_added_to_a_list, OF_STATE),
    Row(
        "layer added to a subclass of Sequential",
        _held(lambda: _Layers(nn.Tanh()), _in_turn, lambda held: held.append(nn.ReLU()) and None),
        OF_STATE,
    ),
    Row("globals of a module as a dict", globals_of_a_module_as_a_dict, OF_STATE),
    Row("another table of parameters", another_table_of_parameters, OF_WEIGHTS),
    Row(
        "buffer added to a layer of torch",
        _optional(lambda model: model.linear.register_buffer("late", _other(model.scale))),
        OF_STATE,
    ),
    Row(
        "attribute in place of a weight",
        _optional(lambda model: vars(model.linear).update(weight=_other(model.linear.weight))),
        OF_STATE_NOT_IN_DYNAMO,
    ),
    Row(
        "attribute in place of a buffer",
        _optional(lambda model: vars(model).update(scale=_other(model.scale))),
        OF_STATE_NOT_IN_DYNAMO,
    ),
    Row(
        "attribute of the class in place of a buffer",
        _optional(lambda model: setattr(type(model), "scale", _other(model.scale))),
        OF_STATE_NOT_IN_DYNAMO,
    ),
    Row(
        "attribute of the class added",
        _optional(lambda model: setattr(type(model), "factor", 3.0)),
        OF_STATE,
    ),
    Row(
        "attribute of nn.Linear in place of a weight",
        attribute_of_the_class_of_a_layer,
        OF_STATE_NOT_IN_DYNAMO,
    ),
    Row("class of a layer", class_of_a_layer, OF_STATE),
    Row(
        "another dict of attributes",
        _optional(lambda model: _with_other_attributes(model, factor=3.0)),
        OF_STATE,
    ),
    Row(
        "another dict of attributes of a layer",
        _optional(
            lambda model: _with_other_attributes(
                model.linear,
                _parameters={**model.linear._parameters, "weight": _other(model.linear.weight)},
            )
        ),
        {NONE: DOCUMENTED, UNTRACED: HostValueChangedError},
    ),
    Row(
        "layer added to a ModuleDict",
        _held(
            lambda: nn.ModuleDict({"a": nn.Tanh()}),
            _in_turn,
            lambda held: held.update({"b": nn.Sigmoid()}),
        ),
        OF_STATE,
    ),
    Row(
        "number in the body of an op",
        number_in_the_body_of_an_op,
        {TRACES: DOCUMENTED, UNTRACED: HostValueChangedError},
    ),
    Row("default dtype", default_dtype, OF_SETTINGS),
    Row("default device", default_device, OF_SETTINGS),
    Row(
        "torch function mode",
        _around(Doubling, Relu),
        OF_SETTINGS,
    ),
    Row("torch dispatch mode", _around(DoublingOps, Relu), OF_SETTINGS),
    Row("sdpa_kernel", sdpa_kernel, OF_SETTINGS),
    Row(
        "deterministic mode",
        _setting(
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            False,
            True,
        ),
        OF_SETTINGS,
    ),
    Row(
        "TF32",
        _setting(
            lambda: torch.get_float32_matmul_precision() == "high",
            lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
            False,
            True,
        ),
        OF_SETTINGS,
    ),
    Row(
        "cuDNN flags",
        _setting(
            lambda: torch.backends.cudnn.benchmark,
            lambda on: setattr(torch.backends.cudnn, "benchmark", on),
            False,
            True,
        ),
        OF_SETTINGS,
    ),
    *(
        Row(
            f"cuDNN {name}",
            _setting(
                lambda name=name: getattr(torch.backends.cudnn, name),
                lambda on, name=name: setattr(torch.backends.cudnn, name, on),
                name == "enabled",
                name != "enabled",
            ),
            OF_SETTINGS,
        )
        for name in ("enabled", "deterministic")
    ),
    Row(
        "TF32 of convolutions",
        _setting(
            lambda: torch.backends.cudnn.conv.fp32_precision == "tf32",
            lambda on: setattr(
                torch.backends.cudnn.conv, "fp32_precision", "tf32" if on else "ieee"
            ),
            False,
            True,
        ),
        OF_SETTINGS,
    ),
    *(
        Row(
            f"allow_{name} of products",
            _setting(
                # Two flags: sums in reduced precision, and splits of the sum.
                lambda name=name: getattr(torch.backends.cuda.matmul, f"allow_{name}") is True,
                lambda on, name=name: setattr(torch.backends.cuda.matmul, f"allow_{name}", on),
                "reduction" in name,
                "reduction" not in name,
            ),
            OF_SETTINGS,
        )
        for name in (
            "fp16_reduced_precision_reduction",
            "bf16_reduced_precision_reduction",
            "fp16_accumulation",
        )
    ),
    Row("priority of sdpa_kernel", priority_of_kernels, OF_SETTINGS),
    Row("autocast", _autocast(torch.bfloat16), OF_SETTINGS),
    Row("autocast left", _autocast(None, torch.bfloat16), OF_SETTINGS),
    Row("dtype of autocast", _autocast(torch.float16, torch.bfloat16), OF_SETTINGS),
    *(
        Row(
            f"tensor of a {holder_kind}, {text}",
            _tensor(holder_kind, how),
            {
                # A traced global is an input, which stays where it is under a context.
                WITH_CONTEXT: AddressChangedError if holder_kind == "global" else RIGHT,
                NONE: DOCUMENTED,
                UNTRACED: AddressChangedError,
            },
        )
        for holder_kind in PLACES
        for how, text in (("alive", "old one alive"), ("freed", "old one freed"))
    ),
    *(
        # Compiled models compare no Python of an op: they see that its memory was dropped.
        Row(
            f"tensor that a custom op reads, old one {how}",
            _tensor("custom op", how),
            {TRACES: of_traces, UNTRACED: AddressChangedError},
        )
        for how, of_traces in (("alive", DOCUMENTED), ("freed", AddressChangedError))
    ),
    Row(
        "tensor that a custom op in a piece reads",
        _tensor("custom op", "freed"),
        # Contexts of the table are FULL.
        {
            TRACES: AddressChangedError,
            WITH_CONTEXT: Reason.OTHER_MODE,
            UNTRACED: AddressChangedError,
        },
        settings={"cudagraph_mode": cgcompile.CUDAGraphMode.PIECEWISE},
    ),
    *(
        Row(f"tensor of a {holder_kind}, other strides", _tensor(holder_kind, "strides"), expect)
        for holder_kind, expect in {
            **dict.fromkeys(PLACES, OF_LAYOUTS),
            "dict": OF_LAYOUTS_IN_DICTS,
            "global": OF_LAYOUTS_OF_INPUTS,
        }.items()
    ),
    Row("tensor by a computed name", tensor_by_a_computed_name, OF_WEIGHTS),
    Row(
        "cache in a list replaced",
        cache_in_a_list,
        # A manager warms up with batches that no eager model gets, and a step of a loop writes its
        # state alone.
        {
            NONE: DOCUMENTED,
            UNTRACED: AddressChangedError,
            MANAGERS: ABSENT,
            LOOP: Refused(LoopStateError),
        },
    ),
    Row("weight replaced", _weights(weight_replaced), OF_WEIGHTS),
    Row("weight.data assigned", _weights(weight_data), OF_WEIGHTS),
    Row("weight written in place", _weights(weight_in_place), same_graphs=True),
    Row("weights updated", _weights(weights_updated), same_graphs=True),
    Row("layer replaced", _weights(layer_replaced), OF_WEIGHTS),
    *(
        Row(f"layer in {kind} replaced", _layer_in(kind, lambda *_: True), OF_WEIGHTS)
        for kind in HELPERS
    ),
    *(
        Row(f"layer in {kind} replaced, same weights", _layer_in(kind, _with_the_same_weights))
        for kind in HELPERS
    ),
    *(
        Row(f"weight of a layer in {kind}", _layer_in(kind, _gets_another_weight), OF_WEIGHTS)
        for kind in ("an object", "a list")
    ),
    Row("layer of another class", _weights(layer_of_another_class), OF_STRUCTURE),
    Row("weight transposed", _weights(weight_transposed), OF_LAYOUTS_IN_DICTS),
    Row("weight of another shape", _of_any_layout(WIDTH, 2), OF_LAYOUTS_IN_DICTS),
    Row("weight of another dtype, in place", _of_any_layout(torch.int16), OF_LAYOUTS_IN_DICTS),
    Row(
        "tensor attribute with other strides", _tensor("attribute", "strides"), OF_LAYOUTS_IN_DICTS
    ),
    Row(".data of the last weight", _weights(last_weight_data), OF_WEIGHTS),
    Row("load_state_dict(assign=True)", _weights(weights_assigned), OF_WEIGHTS),
    Row("bias removed", _weights(bias_removed), OF_WEIGHTS),
    Row("module of another dtype", module_of_another_dtype, OF_WEIGHTS),
    Row("buffer replaced", _buffer("scale"), OF_WEIGHTS),
    Row("tensor attribute replaced", _tensor("attribute", "alive"), OF_WEIGHTS),
    Row("buffer that was None", _buffer("shift"), OF_STRUCTURE),
    *(
        Row(
            f"weight {layer} a boundary {how}",
            _around_boundary(change, layer),
            {**({} if how == "written" else OF_WEIGHTS), BREAK_FULL: ABSENT},
            settings={"splitting_ops": ("hazards::kernel",)},  # a step of pieces
            same_graphs=how == "written",
        )
        for layer, how, change in (
            ("before", "moved", _new_data),
            ("after", "moved", _new_data),
            ("after", "written", lambda weight: weight.fill_(0.5)),
        )
    ),
    Row(
        ".data assigned in the step",
        data_in_the_step,
        {
            TRACES: Reason.TOO_MANY_WEIGHT_SETS,
            UNTRACED: Refused(CaptureError),
            MANAGERS: ABSENT,  # it warms up with batches that no eager model gets
            LOOP: Reason.CAPTURE_FAILED,
        },
    ),
    Row(
        "0-dim tensor of the CPU",
        scalar_of_the_host,
        on_cuda={UNTRACED: HostValueChangedError},  # a host step reads it like any other tensor
    ),
    Row(
        "0-dim parameter of the CPU",
        parameter_of_the_host,
        on_cuda={UNTRACED: HostValueChangedError},
    ),
    Row("table made in the first step", made_in_the_first_step, same_graphs=True),
    Row(
        "metadata moved",
        _metadata(lambda m: m["k"], lambda t: {"k": t}, lambda t: {"k": t.clone()}),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "shape of metadata at one address",
        _metadata(lambda m: m.sum(), lambda t: t[:3], lambda t: t[:5]),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "stride of metadata at one address",
        _metadata(lambda m: m.sum(), lambda t: t[:4], lambda t: t[::2]),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "number in metadata",
        _metadata(lambda m: m["k"], lambda t: {"k": 2.0}, lambda t: {"k": 3.0}),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    *(
        Row(
            name,
            _metadata(read, before, now),
            {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
            settings=WITH_OP,
        )
        for name, read, before, now in (
            (
                "list in metadata is longer",
                lambda m: sum(m["k"]),
                lambda t: {"k": [t, 2.0]},
                lambda t: {"k": [t, 2.0, 3.0]},
            ),
            (
                "item added to metadata",
                lambda m: m["k"] * m.get("scale", 2.0),
                lambda t: {"k": t},
                lambda t: {"k": t, "scale": 3.0},
            ),
            (
                "order of metadata",
                lambda m: functools.reduce(lambda y, value: (y + 1) * value, m.values(), 1.0),
                lambda t: {"k": t, "scale": 2.0},
                lambda t: {"scale": 2.0, "k": t},
            ),
            (
                "set of names in metadata",
                lambda m: 2.0 if "k" in m else 3.0,
                lambda t: {"k"},
                lambda t: {"other"},
            ),
            (
                "array in metadata",
                lambda m: float(m["k"][0]),
                lambda t: {"k": array("d", [2.0])},
                lambda t: {"k": array("d", [3.0])},
            ),
            (
                "attribute of the class of metadata",
                lambda m: m.scale,
                lambda t: _scaling(2.0),
                lambda t: _scaling(3.0),
            ),
        )
    ),
    Row(
        "metadata nested five deep",
        _metadata(
            lambda m: m["a"]["b"]["c"]["d"]["e"],
            _nested,
            lambda t: _nested(t + 1),
        ),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "metadata that two layers share",
        _metadata(lambda m: m["a"]["k"] + m["b"]["k"], _shared, lambda t: _shared(t, t + 1)),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "metadata that holds itself",
        _metadata(lambda m: m["m"]["k"] + m["k"], _cycle, lambda t: _cycle(t, {"k": t + 1})),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "attribute of a tensor in metadata",
        _metadata(lambda m: m * m.factor, lambda t: _scaled(t, 2.0), lambda t: _scaled(t, 3.0)),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "metadata in a set",
        _metadata(lambda m: next(iter(m)), lambda t: {t}, lambda t: {t + 1}),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "tensors inside of a tensor in metadata",
        _metadata(
            lambda m: m["k"].a,
            lambda t: {"k": TwoTensor(t, t)},
            lambda t: {"k": TwoTensor(t + 1, t)},
        ),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "metadata in a closure",
        _metadata(lambda m: m(), _captured, lambda t: _captured(t + 1)),
        {READ_CONTEXT: AddressChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "another function in metadata",
        _metadata(lambda m: m(), _captured, lambda t: lambda: t * 2),
        {READ_CONTEXT: HostValueChangedError, **NO_METADATA},
        settings=WITH_OP,
    ),
    Row(
        "strides that depend on each other",
        _inputs((16, 1), (16, 2), (20, 2)),
    ),
    Row("strides that become equal", _inputs((16, 2), (20, 2), (20, 1))),
    Row("input moves", input_moves, same_graphs=True),
    Row(
        "0-dim tensor of the CPU as an argument",
        scalar_argument,
        # The host recorder reads it where it lies, like any other tensor.
        {WITH_CONTEXT: AddressChangedError, **OF_TENSORS},
        on_cuda={WITH_CONTEXT: RIGHT, UNTRACED: HostValueChangedError, MANAGERS: ABSENT},
        same_graphs=True,
    ),
    Row("number argument", _argument(lambda t: 2, lambda t: 3), OF_ARGUMENTS),
    Row("float argument", _argument(lambda t: 2.5, lambda t: 3.5), OF_ARGUMENTS),
    Row(
        "bool argument",
        _argument(lambda t: True, lambda t: False, lambda a: 2 if a else 3),
        OF_ARGUMENTS,
    ),
    Row(
        "number in a dict argument",
        _argument(
            lambda t: {"k": (t, 2)}, lambda t: {"k": (t, 3)}, lambda a: a["k"][0] * a["k"][1]
        ),
        OF_ARGUMENTS,
    ),
    Row(
        "attribute of a tensor that is an argument",
        _argument(lambda t: _scaled(t, 2.0), lambda t: _scaled(t, 3.0), lambda t: t * t.factor),
        OF_ARGUMENTS,
    ),
    Row(
        "longer list as an argument",
        _argument(lambda t: [t], lambda t: [t, t], lambda a: torch.stack(a).sum(0)),
        {**OF_ARGUMENTS, LOOP: RIGHT},  # a state of another layout has a graph of its own
    ),
    Row(
        "flag of an argument",
        field_of_an_argument("flag", lambda _: False),
        {**OF_ARGUMENTS, UNGUARDED: DOCUMENTED},
    ),
    Row(
        "tensor of an argument replaced",
        field_of_an_argument("scale", lambda options: options.scale + 1),
        {WITH_CONTEXT: AddressChangedError, **OF_TENSORS},
    ),
    Row(
        "tensors inside of a tensor in an argument's field",
        subclass_in_a_field,
        {("shape, context", "none, context"): AddressChangedError, **OF_TENSORS},
    ),
    Row(
        "tensor in nested arguments replaced",
        _argument(lambda t: {"k": [(t,)]}, lambda t: {"k": [(t.clone(),)]}, lambda a: a["k"][0][0]),
        {WITH_CONTEXT: AddressChangedError, **OF_TENSORS},
    ),
    Row(
        "tensor inside of an argument is another argument no more",
        _argument(
            lambda t: [TwoTensor(t, t), t],
            lambda t: [TwoTensor(t.neg(), t.clone()), t],
            lambda arguments: arguments[0].a + arguments[1],
        ),
        {WITH_CONTEXT: AddressChangedError, **OF_TENSORS},
    ),
    Row(
        "another tensor at the address of an argument",
        _argument(lambda t: [t], lambda t: [t.detach().view(WIDTH)], lambda a: a[0]),
        {MANAGERS: ABSENT},
        same_graphs=True,
    ),
    Row(
        "argument needs gradients",
        argument_needs_gradients,
        {(*TRACES, *UNTRACED): Reason.GRADIENTS, MANAGERS: ABSENT},
        grad=torch.enable_grad,
    ),
    Row("second thread", second_thread, {READ_CONTEXT: DispatchError}),
    Row("threads at once", threads_at_once, {READ_CONTEXT: DispatchError}),
    Row(
        "weights need gradients",
        weights_need_gradients,
        {TRACES: Reason.GRADIENTS, UNTRACED: Reason.GRADIENTS, MANAGERS: DOCUMENTED},
        grad=torch.enable_grad,
    ),
    Row(
        "grad mode turned on",
        _around(torch.enable_grad, _trained),
        {(*TRACES, *UNTRACED): Reason.GRADIENTS, MANAGERS: DOCUMENTED},
        grad=torch.no_grad,
    ),
    Row(
        "forward without gradients in grad mode",
        forward_without_gradients,
        {UNTRACED: Reason.GRADIENTS, MANAGERS: RIGHT},
        grad=torch.enable_grad,
        same_graphs=True,
    ),
    Row("grad mode instead of inference mode", _around(lambda: torch.inference_mode(False), Model)),
)
