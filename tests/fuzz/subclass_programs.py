"""Random programs with tensor subclasses, compared with eager: :func:`fuzz`.

Subclasses of one to three tensors, with a context, nested in each other, are arguments, weights,
results, or made inside. Two calls differ in values, in which tensors are one object, in contexts,
in attributes that Python alone reads, and in how the arguments are nested.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from lib.front_ends import ROWS, TRACED, WIDTH, compiled, context, settings
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from cgcompile.errors import AddressChangedError
from fuzz.number_programs import BACKENDS, run_program
from fuzz.running import Options


class Wrapper(torch.Tensor):
    """Wraps the tensors ``names``; each op runs on all of them, and keeps the factor."""

    names: tuple[str, ...]

    @staticmethod
    def __new__(cls, factor: float, *inner: torch.Tensor) -> Any:
        first = inner[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, first.stride(), dtype=first.dtype, device=first.device
        )

    def __init__(self, factor: float, *inner: torch.Tensor) -> None:
        self.factor = factor
        for name, tensor in zip(self.names, inner, strict=True):
            setattr(self, name, tensor)

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.names)
        return f"{type(self).__name__}({self.factor}, {inner})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.names], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, factor: Any, size: Any, stride: Any) -> Any:
        return cls(factor, *(inner[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrappers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Wrapper)]
        outer = wrappers[0]
        if any(type(other) is not type(outer) for other in wrappers):
            return NotImplemented
        factor = 1.0
        for wrapper in wrappers:
            factor *= wrapper.factor
        results = []
        for name in outer.names:
            inner = pytree.tree_map_only(type(outer), attrgetter(name), (args, kwargs or {}))
            results.append(func(*inner[0], **inner[1]))
        if func is torch.ops.aten.sin.default:
            results[0] = results[0] * factor
        if func._schema.name.endswith("_"):
            return args[0]
        return pytree.tree_map(partial(type(outer)._built, factor), *results)

    @classmethod
    def _built(cls, factor: float, *inner: Any) -> Any:
        return cls(factor, *inner) if isinstance(inner[0], torch.Tensor) else inner[0]


class One(Wrapper):
    names = ("data1",)


class Two(Wrapper):
    names = ("first", "second")


class Three(Wrapper):
    names = ("one", "two", "three")


KINDS = (One, Two, Three)
TENSORS = 7  # x, and at most three in each of two subclasses

# Statements on plain tensors x and y, and subclasses p and q; ``inner`` is the name of a tensor.
STATEMENTS = [
    "y = y + plain(p)",
    "y = y * plain(q).tanh()",
    "y = y + plain(p.sin())",
    "y = y + plain((p * 0.5 + 1).cos())",
    "y = y + plain(p + x)",
    "y = y + plain(p.t().contiguous().t())",
    "y = y + plain(p[:, :4].repeat(1, 2))",
    "y = y + plain({kind}({factor}, *[x * {factor}] * {count}) + 1)",
    "y = y + plain(torch.cat((p, p), 1)[:, 4:12])",
    "y = y + x * p.factor",
    "y = y + x if p.factor > 1 else y - x",
    "y = y + x * p.label",
    "y = y * 2 if getattr(q, 'flag', False) else y",
    "y = attend(y)",
    "q = p",
    "q = q.sin()",
    "p = p * q if type(p) is type(q) else p",
    "p = {kind}({factor}, *[y] * {count})",
    "y = y + plain(self.weight.sin() + x)",
    "more.append(p + 1)",
    "more.append(p)",
    "more.append(q)",
    "more.append({kind}({factor}, *[y] * {count}))",
    "p.mul_(0.5)",
    "plain(p).add_(0.25)",
]


def plain(tensor: Any) -> torch.Tensor:
    """Return the sum of the tensors inside."""
    while isinstance(tensor, Wrapper):
        inner = [getattr(tensor, name) for name in type(tensor).names]  # 2.11 traces this form
        tensor = inner[0] if len(inner) == 1 else inner[0] + inner[-1] * 0.5
    return tensor


def attend(y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*[y[None].tanh()] * 3)[0]


class Program(torch.nn.Module):
    """Runs drawn statements on a plain tensor and two subclasses."""

    def __init__(self, text: str, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        scope = {"torch": torch, "plain": plain, "attend": attend}
        scope |= {kind.__name__: kind for kind in KINDS}
        exec(compile(text, f"<subclasses {hash(text)}>", "exec"), scope)
        self.run, self.text = scope["run"], text

    def forward(self, x: torch.Tensor, p: Any, q: Any) -> Any:
        return self.run(self, x, p, q)


def draw(chance: random.Random) -> str:
    """Draw the text of ``run(self, x, p, q)``."""
    lines = ["def run(self, x, p, q):", "    y, more = x * 0.5, []"]
    for _ in range(chance.randint(1, 5)):
        kind = chance.choice(KINDS)
        fields = {
            "kind": kind.__name__,
            "count": len(kind.names),
            "factor": chance.choice((1.0, 2.0)),
        }
        lines.append("    " + chance.choice(STATEMENTS).format(**fields))
    return "\n".join([*lines, "    return y, more"]) + "\n"


class Shape(NamedTuple):
    """What the arguments of two calls may differ in, besides values."""

    kinds: tuple[Any, Any]  # of p and q
    nested: tuple[bool, bool]  # whether they wrap other subclasses
    same: str  # which tensors inside of p and q are one object
    factors: tuple[float, float]
    label: float  # an attribute that Python alone reads
    flag: bool

    @classmethod
    def drawn(cls, chance: random.Random, last: "Shape | None" = None) -> "Shape":
        """Draw one; after another one, of mostly equal fields."""
        shape = cls(
            (chance.choice(KINDS), chance.choice(KINDS)),
            (chance.random() < 0.2, chance.random() < 0.2),
            chance.choice(("", "", "p", "x", "q")),
            (chance.choice((1.0, 1.0, 2.0)), chance.choice((1.0, 2.0))),
            chance.choice((1, 2, 1.0, 0.0, -0.0)),
            chance.random() < 0.3,
        )
        if last is None:
            return shape
        fields = zip(cls._fields, shape, last, strict=True)
        return cls(**{name: new if chance.random() < 0.3 else old for name, new, old in fields})

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[Any, Any, Any]:
        """Return x, p and q, made of tensors."""
        x, *inner = tensors
        of_p, of_q = inner[:3], inner[3:]
        if self.same == "p":
            of_p = [of_p[0]] * 3
        elif self.same == "x":
            of_p[0] = x
        elif self.same == "q":
            of_q[0] = of_p[0]
        pair = []
        for kind, nested, factor, parts in zip(
            self.kinds, self.nested, self.factors, (of_p, of_q), strict=True
        ):
            items = [One(1.0, part) if nested else part for part in parts]
            pair.append(kind(factor, *items[: len(kind.names)]))
        pair[0].label, pair[1].flag = self.label, self.flag
        return x, *pair


class Run:
    """One program behind one front end, beside its reference."""

    def __init__(self, seed: int, options: Options) -> None:
        chance = self.chance = random.Random(seed * 7919 + 3)
        self.device, self.exact = options.device, options.compiler == "eager"
        self.backend = BACKENDS[options.compiler]
        self.front_end = chance.choice(TRACED)
        self.mode = chance.choice(("PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"))
        self.changes = chance.choice((0.0, 0.1, 0.3))  # how often a call differs in its shape
        self.grad_mode = chance.choice((torch.no_grad, torch.no_grad, torch.inference_mode))
        self.under_context = chance.random() < 0.25
        self.shape = Shape.drawn(chance)
        while True:
            self.text, self.weight = draw(chance), chance.choice(KINDS)
            if not isinstance(self._outcome(self._program(), self._tensors()), Exception):
                break
        torch.manual_seed(seed)
        self.model, self.reference = self._program(), self._program()
        self.static = self._tensors()
        config = settings(
            options.device,
            compiler=options.compiler,
            cache_dir="off",
            cudagraph_mode=self.mode,
            on_fallback="count",
        )
        torch._dynamo.reset()
        self.served = compiled(self.front_end, self.model, config)
        self.calls: list[tuple[Shape, list[torch.Tensor]]] = []

    def _program(self) -> Program:
        """Make the model; all have equal weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inner = [torch.randn(WIDTH).to(self.device) for _ in self.weight.names]
        return Program(self.text, self.weight(1.5, *inner))

    def _tensors(self) -> list[torch.Tensor]:
        return list(torch.randn(TENSORS, ROWS, WIDTH).to(self.device).unbind())

    def _outcome(self, step: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        """Return the result of a call, or the error that it raises."""
        try:
            with self.grad_mode():
                return step(*self.shape.arguments(tensors))
        except Exception as error:
            return error

    def step(self) -> None:
        """Run one step in both, and compare results, inputs and errors."""
        if self.chance.random() < self.changes:
            self.shape = Shape.drawn(self.chance, self.shape)
        values = self._tensors()
        self.calls.append((self.shape, [tensor.clone() for tensor in values]))
        mine = [tensor.clone() for tensor in values]
        if self.under_context:
            mine = self.static
            for static, tensor in zip(mine, values, strict=True):
                static.copy_(tensor)
        expected = self._outcome(self.reference, values)
        with context() if self.under_context else nullcontext():
            actual = self._outcome(self.served.step, mine)
        if self.under_context and isinstance(actual, AddressChangedError):
            # Right where calls differ in which tensors are one object: one of them has moved.
            actual = expected if len({shape.same for shape, _ in self.calls}) > 1 else actual
            mine = values
        difference = self._difference(actual, expected) or self._difference(mine, values)
        if difference is not None:
            raise AssertionError(difference)

    def _difference(self, actual: Any, expected: Any) -> str | None:
        if isinstance(actual, Exception) or isinstance(expected, Exception):
            same = type(actual) is type(expected)
            return None if same else f"{actual!r:.300}\n    in eager: {expected!r:.300}"
        pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
        return next((f"{a!r}\n    in eager: {e!r}" for a, e in pairs if not self._same(a, e)), None)

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(other, Wrapper):
            alike = type(one) is type(other) and one.factor == other.factor
            pairs = ((getattr(one, name), getattr(other, name)) for name in other.names)
            return alike and all(self._same(*pair) for pair in pairs)
        if type(one) is not type(other) or not self.exact:
            same = type(one) is type(other)
            return same and torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))

    def torch_differs(self) -> bool:
        """Whether torch alone raises an error of its own, or another result, in the last call."""
        torch._dynamo.reset()
        model, reference = self._program(), self._program()
        step = torch.compile(model, backend=self.backend)
        for shape, tensors in self.calls:
            self.shape = shape
            copies = [tensor.clone() for tensor in tensors]
            pair = self._outcome(step, tensors), self._outcome(reference, copies)
        return (self._difference(*pair) or self._difference(tensors, copies)) is not None

    def __str__(self) -> str:
        how = f"{self.front_end}, {self.mode}, {self.under_context=}, {self.grad_mode.__name__}"
        calls = "\n".join(f"    {shape}" for shape, _ in self.calls[-4:])
        return f"{how}, weight {self.weight.__name__}\n{self.text}the last calls:\n{calls}"


def fuzz(seed: int, options: Options) -> Counter[str]:
    """Run the program of a seed; see :func:`fuzz.number_programs.run_program`."""
    torch.manual_seed(seed)
    return run_program("subclasses", Run(seed, options), seed, options)
