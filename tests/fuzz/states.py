"""Random state that a model reads, and random metadata, both changed between calls.

:func:`fuzz_state` puts values behind a model in all places where Python looks them up, and
:func:`fuzz_metadata` nests tensors in the metadata of a forward context. A column of the table of
hazards runs the model; each call is compared with eager. What a column does not compare, as the
table states, is not changed.
"""

import random
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from lib.front_ends import COLUMNS, ROWS, WIDTH, WITH_CONTEXT, WRAPPERS, column, context
from torch import nn

import cgcompile
from cgcompile.errors import GuardError

CHANGED = 0.2  # of the calls
GUARDED = ("torch.compile", "torch.compile, context", "keep", "keep, context")
SHAPE, NONE = ("shape", "shape, context"), ("none", "none, context")
STATE_COLUMNS = tuple(name for name in COLUMNS if name != "breakable")
METADATA_COLUMNS = (*WITH_CONTEXT, *WRAPPERS, "CudaGraphManager")
PLACES = ("attribute", "dict", "list", "helper", "closure", "global", "parameter", "buffer")
KINDS = ("float", "bool", "text", "tensor")
GLOBALS: dict[str, Any] = {}


# ------------------------------------------------------------------ state


class Cell:
    """A closure with one value."""

    def __init__(self, value: Any) -> None:
        def get() -> Any:
            return value

        def put(new: Any) -> None:
            nonlocal value
            value = new

        self.get, self.put = get, put


class Stateful(nn.Module):
    """Applies the values of its places in turn; ``slots`` are (place, name) of each."""

    def __init__(self, slots: list[tuple[str, str]], values: list[Any], prefix: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.slots, self.prefix = slots, prefix
        self.table: dict[str, Any] = {}
        self.entries: list[Any] = [None] * len(slots)
        self.cells = [Cell(None) for _ in slots]
        self.helper = SimpleNamespace()
        for index, value in enumerate(values):
            self.put(index, value)

    def put(self, index: int, value: Any) -> None:
        where, name = self.slots[index]
        if where == "parameter":
            is_parameter = isinstance(value, nn.Parameter)
            setattr(self, name, value if is_parameter else nn.Parameter(value, requires_grad=False))
        elif where == "buffer":
            self.register_buffer(name, value)
        elif where == "attribute":
            setattr(self, name, value)
        elif where == "dict":
            self.table[name] = value
        elif where == "list":
            self.entries[index] = value
        elif where == "helper":
            setattr(self.helper, name, value)
        elif where == "closure":
            self.cells[index].put(value)
        else:
            GLOBALS[self.prefix + name] = value

    def get(self, index: int) -> Any:
        where, name = self.slots[index]
        if where in ("parameter", "buffer", "attribute"):
            return getattr(self, name)
        if where == "dict":
            return self.table[name]
        if where == "list":
            return self.entries[index]
        if where == "helper":
            return getattr(self.helper, name)
        if where == "closure":
            return self.cells[index].get()
        return GLOBALS[self.prefix + name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for index in range(len(self.slots)):
            value = self.get(index)
            if isinstance(value, str):
                x = x.relu() if value == "relu" else x.tanh()
            elif isinstance(value, bool):
                x = x + 1 if value else x - 1
            else:
                x = x * value
        return x


class StateProgram:
    """A stateful model behind one column, beside its reference."""

    def __init__(self, seed: int, options: Any) -> None:
        self.chance = chance = random.Random(seed * 7919 + 3)
        self.device = options.device
        self.name = chance.choice(STATE_COLUMNS)
        slots, self.kinds = [], []
        for index in range(chance.randint(2, 5)):
            where = chance.choice(PLACES)
            weight = where in ("parameter", "buffer")
            self.kinds.append("tensor" if weight else chance.choice(KINDS))
            slots.append((where, f"slot{index}"))
        self.slots = slots
        self.pools = [[self.value(kind) for _ in range(2)] for kind in self.kinds]
        values = [pool[0] for pool in self.pools]
        self.models = []
        for prefix in ("actual.", "eager."):
            torch.manual_seed(seed)
            model = Stateful(slots, [copied(value) for value in values], prefix)
            self.models.append(model.to(self.device))
        self.front = column(self.name, self.models[0], self.device, compiler=options.compiler)

    def __str__(self) -> str:
        slots = ", ".join(
            f"{kind} in {where}" for kind, (where, _) in zip(self.kinds, self.slots, strict=True)
        )
        return f"{self.name}: {slots}"

    def value(self, kind: str) -> Any:
        if kind == "float":
            return round(self.chance.uniform(0.5, 2.0), 3)
        if kind == "bool":
            return self.chance.random() < 0.5
        if kind == "text":
            return self.chance.choice(("relu", "tanh"))
        return torch.rand(WIDTH, device=self.device) + 0.5

    def ways(self, index: int) -> list[str]:
        """Return how a value may change without a stale result, by the table of hazards."""
        if self.kinds[index] != "tensor":
            return ["replace"] if self.name in GUARDED else []
        weight = self.slots[index][0] in ("parameter", "buffer")
        if self.name in GUARDED + SHAPE:
            return ["replace", "write"]
        return ["replace", "write"] if weight and self.name not in NONE else ["write"]

    def change(self) -> Callable[[], None] | None:
        """Change one value in both models; return what restores it."""
        index = self.chance.randrange(len(self.slots))
        ways = self.ways(index)
        if not ways:
            return None
        if self.chance.choice(ways) == "write":
            numbers = torch.rand(WIDTH, device=self.device) + 0.5
            for model in self.models:
                model.get(index).copy_(numbers)
            return None
        before = [model.get(index) for model in self.models]
        value = self.chance.choice(self.pools[index])
        for model in self.models:
            model.put(index, copied(value))

        def restore() -> None:
            for model, old in zip(self.models, before, strict=True):
                model.put(index, old)

        return restore

    def call(self) -> tuple[Any, Any]:
        x = torch.randn(ROWS, WIDTH, device=self.device)
        expected = self.models[1](x.clone())
        return self.front.step(x), expected

    def close(self) -> None:
        GLOBALS.clear()


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# ------------------------------------------------------------------ metadata


@dataclass
class Record:
    first: Any
    second: Any


Pair = namedtuple("Pair", "first second")
CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda first, second: {"a": first, "b": second},
    "list": lambda first, second: [first, second],
    "tuple": lambda first, second: (first, second),
    "dataclass": Record,
    "namedtuple": Pair,
    "namespace": lambda first, second: SimpleNamespace(first=first, second=second),
}
READ: dict[str, Callable[[Any], list[torch.Tensor]]] = {}


def _mixed(x: torch.Tensor) -> torch.Tensor:
    tensors = READ["tensors"](cgcompile.get_forward_context().attn_metadata)
    for tensor in tensors:
        x = x * tensor.float().mean()
    return x + len(tensors)


@cache
def library() -> torch.library.Library:
    """Define the op that reads metadata, once: ``torch.ops`` keeps it for the whole process."""
    lib = torch.library.Library("cgstates", "FRAGMENT")
    lib.define("mixed(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA"):
        lib.impl("mixed", _mixed, key)
    torch.library.register_fake("cgstates::mixed", torch.empty_like, lib=lib)
    return lib


class ReadsMetadata(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        linear = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(layers)]
        self.layers = nn.ModuleList(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.ops.cgstates.mixed(layer(x))
        return x


def both(holder: Any) -> tuple[Any, Any]:
    """Return the two parts of a container."""
    if isinstance(holder, dict):
        return holder["a"], holder["b"]
    if isinstance(holder, (list, tuple)):
        return holder[0], holder[1]
    return holder.first, holder.second


class MetadataProgram:
    """A model that reads nested metadata behind one column, beside its reference."""

    def __init__(self, seed: int, options: Any) -> None:
        self.chance = chance = random.Random(seed * 7919 + 5)
        self.device = options.device
        self.name = chance.choice(METADATA_COLUMNS)
        self.shape = self.nested(chance.randint(1, 4))
        count = self.leaves(self.shape)
        self.tensors = [torch.rand(8, device=self.device) + 0.5 for _ in range(count)]
        self.read = sorted(chance.sample(range(count), chance.randint(1, count)))
        op = cgcompile.SplittingOp("cgstates::mixed", support=cgcompile.AttentionCGSupport.ALWAYS)
        self.models = []
        for _ in range(2):
            torch.manual_seed(seed)
            self.models.append(ReadsMetadata(1 + seed % 3).to(self.device))
        READ["tensors"] = self.taken
        self.metadata = self.built()
        self.front = column(
            self.name,
            self.models[0],
            self.device,
            lambda: self.metadata,
            compiler=options.compiler,
            splitting_ops=(op,),
        )

    def __str__(self) -> str:
        return f"{self.name}: reads {self.read} of {self.shape}"

    def nested(self, depth: int) -> Any:
        """Draw containers, (kind, part, part); a leaf is None, or a value that does not change."""
        if depth == 0:
            return None
        parts = [self.nested(depth - 1)]
        parts.append(self.chance.choice((None, 3, "text", self.nested(depth - 1))))
        self.chance.shuffle(parts)
        return (self.chance.choice(sorted(CONTAINERS)), *parts)

    def leaves(self, shape: Any) -> int:
        if isinstance(shape, tuple):
            return self.leaves(shape[1]) + self.leaves(shape[2])
        return int(shape is None)

    def built(self) -> Any:
        """Make new containers around the tensors."""
        tensors = iter(self.tensors)

        def build(shape: Any) -> Any:
            if isinstance(shape, tuple):
                return CONTAINERS[shape[0]](build(shape[1]), build(shape[2]))
            return next(tensors) if shape is None else shape

        return build(self.shape)

    def taken(self, metadata: Any) -> list[torch.Tensor]:
        """Return the tensors of metadata that the op reads."""
        tensors: list[torch.Tensor] = []

        def visit(holder: Any, shape: Any) -> None:
            if isinstance(shape, tuple):
                for part, inner in zip(both(holder), shape[1:], strict=True):
                    visit(part, inner)
            elif shape is None:
                tensors.append(holder)

        visit(metadata, self.shape)
        return [tensors[index] for index in self.read]

    def change(self) -> Callable[[], None] | None:
        """Replace a tensor by one at another address or of another layout; return an undo."""
        index = self.chance.randrange(len(self.tensors))
        old = self.tensors[index]
        how = self.chance.choice(("move", "shape", "stride", "dtype"))
        if how == "move":
            new = torch.rand(8, device=self.device) + 0.5
        elif how == "dtype":
            new = old.view(torch.float16)
            new.fill_(1.5)
        else:
            new = old[:4] if how == "shape" else old[::2]
        self.tensors[index] = new
        self.metadata = self.built()

        def restore() -> None:
            self.tensors[index] = old
            old.uniform_(0.5, 1.5)
            self.metadata = self.built()

        return restore

    def call(self) -> tuple[Any, Any]:
        if self.chance.random() < 0.5:
            self.metadata = self.built()
        for tensor in self.tensors:
            tensor.uniform_(0.5, 1.5)
        x = torch.randn(ROWS, WIDTH, device=self.device)
        with context(metadata=self.metadata):
            expected = self.models[1](x.clone())
        return self.front.step(x), expected

    def close(self) -> None:
        READ.clear()


# ------------------------------------------------------------------ running


def fuzz(kind: type[StateProgram | MetadataProgram], seed: int, options: Any) -> Counter[str]:
    """Run a program of ``options.steps`` calls, and compare each with eager.

    A call after a change may raise GuardError. The change is then undone, and the next call must
    be right.

    Raises:
        AssertionError: a result differs, or an error is due to nothing.
    """
    library()
    torch._dynamo.reset()
    torch.manual_seed(seed)
    program = kind(seed, options)
    refused, step = 0, 0
    bound = 1e-2 if options.compiler == "inductor" else None
    try:
        with torch._dynamo.config.patch(recompile_limit=64), torch.inference_mode():
            for step in range(options.steps):
                due = step > 2 and program.chance.random() < CHANGED
                restore = program.change() if due else None
                try:
                    actual, expected = program.call()
                except GuardError:
                    assert restore is not None, "an error although nothing changed"
                    refused += 1
                    restore()
                    actual, expected = program.call()
                torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)
    except Exception as error:
        name = "state" if kind is StateProgram else "metadata"
        command = f"python -m fuzz --kind {name} --reproduce {seed} --compiler {options.compiler}"
        raise AssertionError(f"{command}\nstep {step} of {program}\n{error}") from error
    finally:
        program.close()
    counters = program.front.counters()
    replayable = 1 if counters.replays else 0
    return Counter(
        programs=1,
        steps=options.steps,
        graph_steps=options.steps,
        captures=counters.captures,
        replays=counters.replays,
        replayed_programs=replayable,
        guard_errors=refused,
    )


def fuzz_state(seed: int, options: Any) -> Counter[str]:
    """Fuzz the state of a model; see :func:`fuzz`."""
    return fuzz(StateProgram, seed, options)


def fuzz_metadata(seed: int, options: Any) -> Counter[str]:
    """Fuzz the metadata of forward contexts; see :func:`fuzz`."""
    return fuzz(MetadataProgram, seed, options)
