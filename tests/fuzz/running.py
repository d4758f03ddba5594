"""Run one random program over a schedule of steps, and compare each with eager: :func:`fuzz`.

Compared are the results, all inputs, all buffers, and results of earlier steps that the caller
owns. The reference is a deep copy of the model that runs in eager with copies of the inputs.
"""

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lib.cases import library
from lib.front_ends import COMPILED, MANAGERS, WRAPPERS, context, front_end, settings
from lib.front_ends import ROWS as MANAGED_ROWS
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._pytree import tree_leaves

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.errors import TraceError
from fuzz.programs import FEATURES, TRACED, WIDTH, draw

DRAWN = (*COMPILED, *COMPILED, *WRAPPERS, *MANAGERS)  # some of them twice as often
ROWS = (0, 1, 3, 4, 4, 6, 6)
KEPT = 8  # results of earlier steps that are compared once more
DUE_AFTER = 6  # steps: then a step like them replays, unless there is a reason
LEAST_DUE = 0.25  # of these steps of one program: others have eager results read by graphs
WAYS_TO_REPLACE = ["data", "exchange data", "parameter", "delete", "assign", "load", "buffer"]
WAYS_TO_REPLACE += ["exchange models"]
Tensors = tuple[torch.Tensor, ...]


@dataclass
class Options:
    """What is fuzzed: a device, a compiler of pieces, groups of operations, steps of a program."""

    device: str = "cpu"
    compiler: str = "eager"
    features: tuple[str, ...] = tuple(FEATURES)
    steps: int = 300


@dataclass
class Draw:
    """What a seed decides besides the program."""

    seed: int
    front_end: str
    mode: str
    guards: str
    inference: bool
    context: bool
    autocast: bool
    instances: int
    chained: bool
    static: bool
    grads: float
    chance: random.Random = field(repr=False)

    @property
    def traced(self) -> bool:
        return self.front_end in COMPILED

    @property
    def managed(self) -> bool:
        return self.front_end in MANAGERS


def drawn(seed: int, options: Options) -> Draw:
    chance = random.Random(seed * 7919 + 1)
    name = chance.choice(DRAWN)
    context = name in WRAPPERS or (name in COMPILED and chance.random() < 0.4)
    instances = chance.choice((1, 1, 2, 3)) if name in COMPILED else 1
    return Draw(
        seed,
        name,
        chance.choice(("PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "NONE")),
        chance.choice(("keep", "shape", "none")),
        inference=chance.random() < 0.5,
        context=context,
        autocast=chance.random() < 0.2 and options.compiler == "eager" and name not in MANAGERS,
        instances=instances,
        chained=instances > 1 and chance.random() < 0.3,
        static=context or chance.random() < 0.5,
        grads=chance.choice((0, 0, 0.2)),
        chance=chance,
    )


class Single(nn.Module):
    """A program as a manager takes it: one input, one result, the cache is a buffer."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        program.returns = "one"
        self.program = program
        self.register_buffer("cache", torch.zeros(max(ROWS), WIDTH))

    @property
    def steps(self) -> Any:
        return self.program.steps

    @property
    def returns(self) -> str:
        return self.program.returns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(x, self.cache[: len(x)]).clone()


class Run:
    """One program behind one front end, beside its reference."""

    def __init__(self, seed: int, options: Options) -> None:
        library()
        self.options = options
        self.drawn = drawn(seed, options)
        features = [name for name in options.features if self.drawn.traced or name not in TRACED]
        program = draw(seed, tuple(features), self.drawn.autocast)
        model = Single(program) if self.drawn.managed else program
        self.models = [model.to(options.device)]  # instances of the program
        for _ in range(1, self.drawn.instances):
            self.models.append(copy.deepcopy(model))
            with torch.no_grad():
                for weight in (*self.models[-1].parameters(), *self.models[-1].buffers()):
                    weight.mul_(0.5 + 0.3 * len(self.models))
        self.references = copy.deepcopy(self.models)  # run in eager
        self.exact = options.compiler == "eager"
        self.static: dict[tuple[int, str], Tensors] = {}
        self.kept: list[tuple[int, Any, Any]] = []
        self.like_it: Counter[Any] = Counter()
        self.replays = self.due = self.due_replays = self.steps = self.called = 0
        self.calls = self._build()

    def _build(self) -> list[Callable[..., Any]]:
        drawn, device = self.drawn, self.options.device
        config = settings(
            device,
            compiler=self.options.compiler,
            cache_dir="off",
            cudagraph_mode=drawn.mode if drawn.traced else "FULL",
            splitting_ops=("cgtest::scale_",) if drawn.traced else (),
        )
        self.mode = CUDAGraphMode.PIECEWISE if drawn.traced else CUDAGraphMode.FULL
        if drawn.front_end in WRAPPERS:
            self.target = getattr(cgcompile, drawn.front_end)(self.models[0], config, self.mode)
            return [self.target]
        if drawn.managed:
            front = front_end(drawn.front_end, self.models[0], device)
            self.target = front.target
            with torch.inference_mode(drawn.inference), torch.no_grad():
                front.step(torch.randn(MANAGED_ROWS, WIDTH, device=device))
            self.references[0].load_state_dict(self.models[0].state_dict())  # a capture runs it
            return [front.step]
        self.target = cgcompile.Backend(config)
        if drawn.front_end == "torch.compile":
            torch._dynamo.reset()
            return [torch.compile(m, backend=self.target, dynamic=True) for m in self.models]
        dims = {"x": 0, "cache": 0}
        return [
            cgcompile.compile(m, self.target, dynamic_dims=dims, guards=drawn.guards)
            for m in self.models
        ]

    # -------------------------------------------------------------- one step

    def step(self) -> None:
        """Run one step in both, and compare."""
        self.steps += 1
        chance = self.drawn.chance
        self._between_steps()
        inputs, others = self._inputs()
        which = chance.randrange(len(self.models))
        for model in range(len(self.models)) if self.drawn.chained else (which,):
            actual, expected = self._call(model, inputs, others)
            if self.drawn.chained:  # as layers of one class: a result is the next one's input
                inputs, others = _passed_on(inputs, actual), _passed_on(others, expected)

    def _call(self, which: int, inputs: Tensors, others: Tensors) -> tuple[Any, Any]:
        """Call one model and its reference, write to their tensors at times, and compare."""
        if self.drawn.context:  # the next call with its weights overwrites its results
            weighted = any(op == "linear" for op, _, _ in self.models[0].steps)
            several = weighted and self.drawn.front_end == "torch.compile"  # one compiled graph
            self.kept = [row for row in self.kept if several and row[0] != which]
        with self._modes():
            expected = self.references[which](*others)
            before = self.target.counters.replays
            rows = len(inputs[0])
            with context(rows, self.mode) if self.drawn.context else nullcontext():
                actual = self.calls[which](*inputs)
            replayed = self.target.counters.replays > before
            self._count(replayed, which, rows)
            self._compare(actual, expected, "result")
            self._compare_state(inputs, others)
            if not self.drawn.managed and self.drawn.chance.random() < 0.3:
                self._write((*inputs, actual), (*others, expected))
                self._compare(actual, expected, "result that the caller wrote to")
                self._compare_state(inputs, others)
        for _, result, copied in self.kept:
            self._compare(result, copied, "kept")
        if not self.drawn.managed and self.drawn.front_end not in WRAPPERS:
            self.kept = [*self.kept[1 - KEPT :], (which, actual, expected)]
        return actual, expected

    def _count(self, replayed: bool, which: int, rows: int) -> None:
        """Count the step, and whether it was due: one like it ran before, with the same weights."""
        like_it = (which, rows, torch.is_grad_enabled())
        self.like_it[like_it] += 1
        self.called += 1
        self.replays += replayed
        if self.like_it[like_it] > DUE_AFTER:
            self.due += 1
            self.due_replays += replayed

    def check_replayed(self) -> None:
        """Check that enough steps replay: a capture at each step would be right and useless."""
        rebinds = any(op == "rebind" for op, _, _ in self.models[0].steps)
        without = self.drawn.traced and self.drawn.mode == "NONE"
        # a fresh input that the step writes is bound by address: it does not replay
        if self.drawn.static and not rebinds and not without and self.due >= 100:
            share = self.due_replays / self.due
            assert share >= LEAST_DUE, f"{share:.0%} replayed of {self.due} steps that were due"

    def _compare_state(self, inputs: Tensors, others: Tensors) -> None:
        if not self.drawn.managed:  # a manager runs a copy of its inputs
            self._compare(inputs, others, "inputs")
        for one, other in zip(self.models, self.references, strict=True):
            self._compare(list(one.buffers()), list(other.buffers()), "buffers")

    def _write(self, actual: Any, expected: Any) -> None:
        """Write to an input, or to a result that may be one, as a caller may."""
        pairs = list(zip(tree_leaves(actual), tree_leaves(expected), strict=True))
        one, other = self.drawn.chance.choice(pairs)
        other.mul_(0.5)
        one.mul_(0.5)

    def _modes(self) -> ExitStack:
        """The grad mode and autocast of a step."""
        stack = ExitStack()
        if self.drawn.inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(
                torch.set_grad_enabled(self.drawn.chance.random() < self.drawn.grads)
            )
        if self.drawn.autocast:
            stack.enter_context(torch.autocast(self.options.device, torch.bfloat16))
        return stack

    def _inputs(self) -> tuple[Tensors, Tensors]:
        """Return the inputs of the model, and of its reference."""
        if self.drawn.managed:  # padded rows would count in a program that mixes rows
            larger = max(ROWS) if self.drawn.front_end.startswith("Encoder") else MANAGED_ROWS
            rows = self.drawn.chance.choice((MANAGED_ROWS, MANAGED_ROWS, larger))
            x = torch.randn(rows, WIDTH, device=self.options.device)
            return (x,), (x.clone(),)
        rows = self.drawn.chance.choice(ROWS)
        pairs = [self._input(name, rows) for name in ("x", "cache")]
        return tuple([one for one, _ in pairs]), tuple([other for _, other in pairs])

    def _input(self, name: str, rows: int) -> Tensors:
        fresh = torch.randn(rows, WIDTH, device=self.options.device)
        if not self.drawn.static and name == "x":
            return fresh, fresh.clone()
        pair = self.static.setdefault((rows, name), (fresh.clone(), fresh.clone()))
        for static in pair:
            static.copy_(fresh)
        return pair

    # -------------------------------------------------------------- between steps

    def _between_steps(self) -> None:
        """Now and then change weights in place, replace them, or release all graphs."""
        chance = self.drawn.chance
        what = chance.random()
        pairs = list(zip(self.models, self.references, strict=True))
        one, other = map(self._program, chance.choice(pairs))
        with torch.inference_mode(self.drawn.inference), torch.no_grad():
            if what < 0.06:
                noise = torch.rand(WIDTH, device=self.options.device)
                for program in (one, other):
                    weight = program.first.weight if what < 0.03 else program.state
                    weight.mul_(0.9).add_(noise, alpha=0.1)
                return
        if what < 0.08 and self._may_replace:
            self._replace(one, other)
        elif what < 0.083 and not self.drawn.managed:
            if self.drawn.context:
                self.kept.clear()
            self.like_it.clear()
            release = self.target.release if self.drawn.traced else self.target.clear_graphs
            release()

    def _replace(self, one: nn.Module, other: nn.Module) -> None:
        """Give a program and its reference other parameters, or other memory for them."""
        if self.drawn.context:
            self.kept.clear()
        self.like_it.clear()
        way = self.drawn.chance.choice(WAYS_TO_REPLACE)
        states = [
            {
                name: value.flip(0) if name == "second.weight" else value * 0.9
                for name, value in program.state_dict().items()
            }
            for program in (one, other)
        ]
        for program, state in zip((one, other), states, strict=True):
            with torch.inference_mode(self.drawn.inference and way == "load"):
                replace(program, way, state)
        if way == "exchange models":
            for programs in (self.models, self.references):
                first, last = programs[0], programs[-1]
                first.second.weight, last.second.weight = last.second.weight, first.second.weight

    def _program(self, model: nn.Module) -> nn.Module:
        return model.program if self.drawn.managed else model

    @property
    def _may_replace(self) -> bool:
        guarded = self.drawn.front_end == "torch.compile" or self.drawn.guards != "none"
        # in a chain a result that moves is an input that moves
        fixed = self.drawn.chained and self.drawn.context
        return self.drawn.traced and guarded and not fixed

    def _compare(self, actual: Any, expected: Any, what: str) -> None:
        one, other = tree_leaves(actual), tree_leaves(expected)
        if len(one) == len(other) and all(map(torch.equal, one, other)):  # the quick way
            return
        tolerance = {"rtol": 0, "atol": 0} if self.exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            actual, expected, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
        )

    def __str__(self) -> str:
        lines = [f"    {op}({i}, {j})" for op, i, j in self.models[0].steps]
        return "\n".join((f"{self.drawn}", *lines, f"    returns {self.models[0].returns}"))


def _passed_on(inputs: Tensors, result: Any) -> Tensors:
    """Return the inputs of the next layer: the last tensor of a result that fits replaces x."""
    fitting = [
        tensor
        for tensor in tree_leaves(result)
        if tensor.shape == inputs[0].shape
        and tensor.is_contiguous()
        and tensor.dtype is torch.float32
    ]
    return (fitting[-1] if fitting else inputs[0], *inputs[1:])


def replace(program: nn.Module, way: str, state: dict[str, torch.Tensor]) -> None:
    """Change or replace the weights of one program."""
    first, second, weight = program.first, program.second, state["second.weight"]
    if way == "data":
        second.weight.data = weight
    elif way == "exchange data":
        first.weight.data, second.weight.data = second.weight.data, first.weight.data
    elif way == "parameter":
        second.weight = nn.Parameter(weight, requires_grad=False)
    elif way == "delete":
        del second.weight
        second.weight = nn.Parameter(weight, requires_grad=False)
    elif way in ("assign", "load"):
        program.load_state_dict(state, assign=way == "assign")
    elif way == "buffer":
        program.state = state["state"].mul_(0.5)


def fuzz(seed: int, options: Options) -> Counter[str]:
    """Run the program of a seed; return the counts of programs, steps, captures and replays.

    A program of which both cgcompile and torch alone fix a size is counted as refused. What differs
    from eager is an AssertionError whose text reproduces it.
    """
    run = Run(seed, options)
    torch.manual_seed(seed)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            for _ in range(options.steps):
                run.step()
        run.check_replayed()
    except Exception as error:
        if isinstance(error, TraceError) and torch_fixes_a_size(seed, options):
            return Counter(programs=1, refused=1)
        command = f"python -m fuzz --reproduce {seed} --compiler {options.compiler}"
        if options.features != tuple(FEATURES):
            command += " --features " + " ".join(options.features)
        raise AssertionError(f"{command}\nstep {run.steps} of {run}\n{error}") from error
    captures = run.target.counters.captures
    with_graphs = run.drawn.mode != "NONE" or not run.drawn.traced
    return Counter(
        programs=1,
        steps=run.called,
        graph_steps=run.called * with_graphs,
        captures=captures,
        replays=run.replays,
        due=run.due * with_graphs,
        due_replays=run.due_replays * with_graphs,
    )


def torch_fixes_a_size(seed: int, options: Options) -> bool:
    """Whether torch alone compiles the program of a seed for one number of rows only.

    AOTAutograd does that for some writes to a view whose memory also has another name.
    """
    run = Run(seed, options)
    backend = {"eager": "eager", "aot": "aot_eager", "inductor": "inductor"}[options.compiler]
    torch._dynamo.reset()
    x, cache = torch.randn(2, 3, WIDTH, device=options.device).unbind()
    x, cache = x.clone(), cache.clone()
    for tensor in (x, cache):
        torch._dynamo.mark_dynamic(tensor, 0)
    try:
        with run._modes():
            torch.compile(run.references[0], backend=backend, dynamic=True)(x, cache)
    except ConstraintViolationError:
        return True
    return False


def outcome(
    seed: int, options: Options, run: Callable[[int, Options], Counter[str]] = fuzz
) -> tuple[int, Counter[str], str]:
    """Return (seed, counts of a run, what failed); for a process of its own."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a capture collects garbage: older objects need not be searched
    try:
        return seed, run(seed, options), ""
    except AssertionError as error:
        return seed, Counter(), str(error)
