"""Random programs of tensors and Python numbers that vary, compared with eager: :func:`fuzz`.

A step calls with new numbers, often at an edge (0.0, -0.0, 2**63, nan, a bool). The same class of
error counts as equal. An error of torch's own tracer that torch's backend "eager" raises as well
ends a program: it counts as refused.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lib.front_ends import COMPILED, ROWS, TRACED, WIDTH, compiled, context, settings
from torch._dynamo.exc import TorchRuntimeError
from torch.utils._pytree import tree_leaves

from cgcompile.errors import HostValueChangedError, TraceError
from fuzz.running import Options

BACKENDS = {"eager": "eager", "aot": "aot_eager", "inductor": "inductor"}  # of torch, by compiler
EDGES: dict[type, list[Any]] = {
    int: [0, 1, -1, 2**31, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, 2**63, -(2**63), 2**64],
    float: [0.0, -0.0, 1.0, 1e-310, 3.5e38, 1e39, 1e308, float("inf"), float("nan"), 2.0**62],
}
NAMES = "abc"

# Expressions of numbers: {0} and {1} are numbers or such expressions.
ARITHMETIC = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "{0} // {1}", "{0} % {1}", "-{0}"]
ARITHMETIC += ["max({0}, {1})", "min({0}, {1})", "{0} * x.shape[0]", "{0} + 3", "2.5 * {0}"]
ARITHMETIC += ["float({0})", "{0} * self.factor", "abs({0})", "int({0} > {1})"]

# Statements on the tensors x, f32[rows, WIDTH], and y, a changed copy of x; {0} is a number.
STATEMENTS = [
    "y = y + {0}",
    "y = {0} - y",
    "y = y * {0}",
    "y = y / {0}",
    "y = {0} / y",
    "y = y + (x > {0})",
    "y = torch.where(x > 0, y, {0})",
    "y = y.masked_fill(x > 0.5, {0})",
    "y = y + torch.full_like(x, {0})",
    "y = y + torch.full((WIDTH,), {0}, device=x.device)",
    "y = y + (x.to(torch.bfloat16) * {0}).float()",
    "y = y + (x.double() * {0}).float()",
    "y = y + ((x * 9).to(torch.int32) + {0}).float()",
    "y = y + x.new_full((WIDTH,), {0})",
    "y = y.clone().mul_({0})",
    "y = torch.copysign(y, {0})",
    "y = y * 2 if {0} > 1 else y - 1",
    "y = attend(y)",
    "y = y % {0}",
    "self.total = {0}",
    "more.append({0})",
]


def attend(y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*[y[None].tanh()] * 3)[0]


class Program(torch.nn.Module):
    """Runs drawn statements on a tensor and three numbers."""

    def __init__(self, text: str, factor: float) -> None:
        super().__init__()
        self.factor, self.total = factor, 0.5
        scope = {"torch": torch, "WIDTH": WIDTH, "attend": attend}
        exec(compile(text, f"<numbers {hash(text)}>", "exec"), scope)
        self.run = scope["run"]
        self.text = text

    def forward(self, x: torch.Tensor, a: Any, b: Any, c: Any) -> Any:
        return self.run(self, x, a, b, c)


def draw(chance: random.Random) -> str:
    """Draw the text of ``run(self, x, a, b, c)``."""

    def number(depth: int) -> str:
        if depth == 0 or chance.random() < 0.4:
            return chance.choice(NAMES)
        expression = chance.choice(ARITHMETIC)
        return f"({expression.format(number(depth - 1), number(depth - 1))})"

    lines = ["def run(self, x, a, b, c):", "    y, more = x * 0.5, []"]
    for _ in range(chance.randint(1, 5)):
        lines.append("    " + chance.choice(STATEMENTS).format(number(chance.choice((0, 1, 2)))))
    return "\n".join([*lines, "    return y, more"]) + "\n"


class Run:
    """One program behind one front end, beside its reference."""

    def __init__(self, seed: int, options: Options) -> None:
        chance = self.chance = random.Random(seed * 7919 + 2)
        self.text, factor = draw(chance), chance.choice((1.5, 2, 0.0, -0.0))
        self.model, self.reference = Program(self.text, factor), Program(self.text, factor)
        self.front_end = chance.choice(TRACED)
        self.dynamic = chance.choice((None, True)) if self.front_end in COMPILED else None
        self.mode = chance.choice(("PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"))
        self.edges = chance.choice((0.0, 0.02, 0.1, 0.3))  # how often a number is at an edge
        self.kinds = {name: chance.choice((int, float)) for name in NAMES}
        self.fixed = {name: chance.random() < 0.25 for name in NAMES}
        self.last = {name: self._number(name) for name in NAMES}
        self.under_context = chance.random() < 0.3
        self.static = torch.empty(ROWS, WIDTH, device=options.device)
        self.device, self.exact = options.device, options.compiler == "eager"
        self.backend = BACKENDS[options.compiler]
        config = settings(
            options.device,
            compiler=options.compiler,
            cache_dir="off",
            cudagraph_mode=self.mode,
            on_fallback="count",
        )
        torch._dynamo.reset()
        self.served = compiled(self.front_end, self.model, config, self.dynamic)
        self.calls: list[tuple[Any, ...]] = []

    def _number(self, name: str) -> Any:
        """Draw a number: mostly small ones of one type."""
        kind, what = self.kinds[name], self.chance.random()
        if what < self.edges:
            return self.chance.choice(EDGES[kind])
        if what < 1.2 * self.edges:
            return self.chance.choice((True, False, 3, 0.5))
        return self.chance.randint(-9, 30) if kind is int else self.chance.uniform(-4, 4)

    def step(self) -> None:
        """Run one step in both, and compare results, attributes and errors."""
        for name in NAMES:
            if not self.fixed[name] or self.chance.random() < 0.1:
                self.last[name] = self._number(name)
        x = torch.randn(ROWS, WIDTH, device=self.device)
        self.calls.append((x, *self.last.values()))
        expected = outcome(self.reference, *self.calls[-1])
        with context() if self.under_context else nullcontext():
            actual = outcome(self.served.step, self.static.copy_(x), *self.calls[-1][1:])
        if self.under_context and isinstance(actual, HostValueChangedError):
            self.model.total = self.reference.total  # a number that is part of graphs
            return
        difference = self._difference(actual, expected)
        if difference is not None:
            raise AssertionError(difference)

    def _difference(self, actual: Any, expected: Any) -> str | None:
        if isinstance(actual, Exception) or isinstance(expected, Exception):
            # An error in a trace of all the code is named, and is not that of the op.
            named = (type(expected), TraceError, TorchRuntimeError)
            classes = named if isinstance(expected, Exception) else ()
            same = isinstance(actual, classes)
            return None if same else f"{actual!r:.300}\n    in eager: {expected!r:.300}"
        pairs = [*zip(tree_leaves(actual), tree_leaves(expected), strict=True)]
        pairs.append((self.model.total, self.reference.total))
        return next((f"{a!r}\n    in eager: {e!r}" for a, e in pairs if not self._same(a, e)), None)

    def _same(self, one: Any, other: Any) -> bool:
        if not isinstance(other, torch.Tensor):
            return type(one) is type(other) and repr(one) == repr(other)
        if self.exact and self.device == "cpu":  # but the sign of nan
            numbers = [tensor.nan_to_num(7.0, posinf=8.0, neginf=-8.0) for tensor in (one, other)]
            signs = [tensor.signbit() | tensor.isnan() for tensor in (one, other)]
            same = one.isnan().equal(other.isnan()) and torch.equal(*numbers)
            return same and torch.equal(*signs) and torch.equal(one.isinf(), other.isinf())
        close = torch.isclose(one, other, rtol=1e-2, atol=1e-2, equal_nan=True)
        return bool(close.float().mean() >= 0.9)  # rounding may change ``%`` and comparisons

    def torch_differs(self) -> bool:
        """Whether torch alone raises an error of its own, or another result, in the last call."""
        for dynamic in {self.dynamic, None, True}:
            torch._dynamo.reset()
            model, reference = (Program(self.text, self.model.factor) for _ in range(2))
            step = torch.compile(model, backend=self.backend, dynamic=dynamic)
            for call in self.calls:
                pair = outcome(step, *call), outcome(reference, *call)
            if self._difference(*pair) is not None:
                return True
        return False

    def __str__(self) -> str:
        how = f"{self.front_end}, dynamic={self.dynamic}, {self.mode}, {self.under_context=}"
        calls = "\n".join(f"    {call[1:]}" for call in self.calls[-4:])
        return f"{how}, factor={self.model.factor}\n{self.text}the last calls:\n{calls}"


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or the error that it raises."""
    try:
        with torch.inference_mode():
            return function(*args)
    except Exception as error:
        return error


def run_program(kind: str, run: Any, seed: int, options: Options) -> Counter[str]:
    """Run all steps; return the counts of programs, steps, captures and replays.

    A program on which torch alone differs from eager is counted as refused. What differs otherwise
    is an AssertionError whose text reproduces it.
    """
    refused = 0
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(options.steps):
            try:
                run.step()
            except AssertionError as error:
                where = f"step {len(run.calls)} of {run}"
                if run.torch_differs():
                    refused = 1
                    break
                command = f"python -m fuzz --kind {kind} --reproduce {seed} --each {options.steps}"
                command += f" --compiler {options.compiler} --device {options.device}"
                raise AssertionError(f"{command}\n{where}\n    {error}") from error
    counters = run.served.counters()
    return Counter(
        programs=1,
        refused=refused,
        steps=len(run.calls),
        graph_steps=len(run.calls),
        captures=counters.captures,
        replays=counters.replays,
    )


def fuzz(seed: int, options: Options) -> Counter[str]:
    """Run the program of a seed; see :func:`run_program`."""
    torch.manual_seed(seed)
    return run_program("numbers", Run(seed, options), seed, options)
