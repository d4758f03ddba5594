"""Runs one random program over a schedule of steps and compares each with eager: :func:`fuzz`.

Compared are the results, all inputs, all buffers, and results of earlier steps that the caller
owns. The reference is a deep copy of the model that runs in eager with copies of the inputs.
"""

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import library
from hazard_support import COMPILED, MANAGERS, WRAPPERS, front_end
from hazard_support import ROWS as MANAGED_ROWS
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._pytree import tree_leaves

import cgcompile
from cgcompile import BatchDescriptor, CompilationConfig, CUDAGraphMode, set_forward_context
from cgcompile.errors import TraceError
from fuzz.programs import FEATURES, TRACED, WIDTH, draw

DRAWN = (*COMPILED, "cgcompile.compile", *WRAPPERS, *MANAGERS)  # one of them twice as often
ROWS = (0, 1, 3, 4, 4, 6, 6)
KEPT = 8  # results of earlier steps that are looked at again
Tensors = dict[int, torch.Tensor]


@dataclass
class Options:
    """What is fuzzed.

    Attributes:
        device: "cpu" or "cuda".
        compiler: of pieces: "eager", "aot" or "inductor".
        features: groups of operations.
        steps: of each program.
    """

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
    return Draw(
        seed,
        name,
        chance.choice(("PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "NONE")),
        chance.choice(("keep", "shape", "none")),
        inference=chance.random() < 0.5,
        context=name in WRAPPERS or (name in COMPILED and chance.random() < 0.4),
        autocast=chance.random() < 0.2 and options.compiler == "eager" and name not in MANAGERS,
        instances=2 if name in COMPILED and chance.random() < 0.3 else 1,
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
    """One program behind one front end, beside its reference.

    Attributes:
        models: the program, and a second instance of it with other weights if one was drawn.
        references: a copy of each, which runs in eager.
        calls: of each, what runs it behind the front end.
    """

    def __init__(self, seed: int, options: Options) -> None:
        library()
        self.options = options
        self.drawn = drawn(seed, options)
        features = [name for name in options.features if self.drawn.traced or name not in TRACED]
        program = draw(seed, tuple(features), self.drawn.autocast)
        model = Single(program) if self.drawn.managed else program
        self.models = [model.to(options.device)]
        for _ in range(1, self.drawn.instances):
            self.models.append(copy.deepcopy(model))
            with torch.no_grad():
                for weight in (*self.models[-1].parameters(), *self.models[-1].buffers()):
                    weight.mul_(0.75)
        self.references = copy.deepcopy(self.models)
        self.exact = options.compiler == "eager"
        self.static: dict[tuple[int, str], torch.Tensor] = {}
        self.kept: list[tuple[Any, Any]] = []
        self.replays = self.steps = 0
        self.calls = self._build()

    def _build(self) -> list[Callable[..., Any]]:
        drawn, device = self.drawn, self.options.device
        config = CompilationConfig(
            capture_device="host" if device == "cpu" else "auto",
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
        """Run one step in both, and compare.

        Raises:
            AssertionError: they differ.
        """
        self.steps += 1
        chance = self.drawn.chance
        self._between_steps()
        which = chance.randrange(len(self.models))
        reference = self.references[which]
        inputs = self._inputs()
        others = tuple(tensor.clone() for tensor in inputs)
        with self._modes():
            expected = reference(*others)
            before = self.target.counters.replays
            with self._context(len(inputs[0])):
                actual = self.calls[which](*inputs)
            self.replays += self.target.counters.replays > before
        self._compare(actual, expected, "result")
        if not self.drawn.managed:  # a manager runs a copy of its inputs
            self._compare(inputs, others, "inputs")
        for one, other in zip(self.models, self.references, strict=True):
            self._compare(dict(one.named_buffers()), dict(other.named_buffers()), "buffers")
        self._look_at_kept(actual, *inputs)

    def _modes(self) -> ExitStack:
        """The grad mode and autocast of a step."""
        stack = ExitStack()
        if self.drawn.inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(self.drawn.chance.random() < 0.2))
        if self.drawn.autocast:
            stack.enter_context(torch.autocast(self.options.device, torch.bfloat16))
        return stack

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        if self.drawn.managed:  # padded rows would count in a program that mixes rows
            larger = max(ROWS) if self.drawn.front_end.startswith("Encoder") else MANAGED_ROWS
            rows = self.drawn.chance.choice((MANAGED_ROWS, MANAGED_ROWS, larger))
            return (torch.randn(rows, WIDTH, device=self.options.device),)
        rows = self.drawn.chance.choice(ROWS)
        return self._input("x", rows), self._input("cache", rows)

    def _between_steps(self) -> None:
        chance = self.drawn.chance
        what = chance.random()
        which = chance.randrange(len(self.models))
        programs = [self._program(models[which]) for models in (self.models, self.references)]
        with torch.inference_mode(self.drawn.inference), torch.no_grad():
            if what < 0.03:
                noise = torch.randn(WIDTH, WIDTH, device=self.options.device)
                for program in programs:
                    program.first.weight.mul_(0.9).add_(noise, alpha=0.1)
            elif what < 0.06:
                noise = torch.rand(WIDTH, device=self.options.device)
                for program in programs:
                    program.state.copy_(noise)
            elif what < 0.065 and self._may_replace:
                weight = torch.randn(WIDTH, WIDTH, device=self.options.device) * 0.3
                for program in programs:
                    program.second.weight = nn.Parameter(weight.clone(), requires_grad=False)
            elif what < 0.068 and not self.drawn.managed:
                self.kept.clear()
                release = self.target.release if self.drawn.traced else self.target.clear_graphs
                release()

    def _program(self, model: nn.Module) -> nn.Module:
        return model.program if self.drawn.managed else model

    @property
    def _may_replace(self) -> bool:
        guarded = self.drawn.front_end == "torch.compile" or self.drawn.guards == "keep"
        return self.drawn.traced and guarded and not self.drawn.context

    def _input(self, name: str, rows: int) -> torch.Tensor:
        fresh = torch.randn(rows, WIDTH, device=self.options.device)
        if not self.drawn.context and name == "x":
            return fresh
        return self.static.setdefault((rows, name), torch.empty_like(fresh)).copy_(fresh)

    def _context(self, rows: int) -> AbstractContextManager[Any]:
        if not self.drawn.context:
            return nullcontext()
        descriptor = BatchDescriptor(rows)
        return set_forward_context(cudagraph_runtime_mode=self.mode, batch_descriptor=descriptor)

    def _compare(self, actual: Any, expected: Any, what: str) -> None:
        tolerance = {"rtol": 0, "atol": 0} if self.exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            actual, expected, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
        )

    def _look_at_kept(self, actual: Any, *inputs: torch.Tensor) -> None:
        """Results that the caller owns do not change later; without a context all are."""
        if self.drawn.context or self.drawn.managed:
            return
        for result, copied in self.kept:
            torch.testing.assert_close(
                result, copied, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"kept: {text}"
            )
        buffers = [buffer for model in self.models for buffer in model.buffers()]
        shared = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *buffers)}
        own = [
            leaf for leaf in tree_leaves(actual) if leaf.untyped_storage().data_ptr() not in shared
        ]
        self.kept = [*self.kept[1 - KEPT :], (own, [leaf.clone() for leaf in own])]

    def __str__(self) -> str:
        lines = [f"    {op}({i}, {j})" for op, i, j in self.models[0].steps]
        return "\n".join((f"{self.drawn}", *lines, f"    returns {self.models[0].returns}"))


def fuzz(seed: int, options: Options) -> Counter[str]:
    """Run the program of a seed.

    Returns:
        How many programs, steps, captures and replays there were. A program is counted as refused
        instead if cgcompile says that a size is fixed, and torch by itself says so as well.

    Raises:
        AssertionError: something differs from eager; the text reproduces it.
    """
    run = Run(seed, options)
    torch.manual_seed(seed)
    try:
        for _ in range(options.steps):
            run.step()
    except Exception as error:
        if isinstance(error, TraceError) and torch_fixes_a_size(seed, options):
            return Counter(programs=1, refused=1)
        again = f"python -m fuzz --reproduce {seed} --compiler {options.compiler}"
        if options.features != tuple(FEATURES):
            again += " --features " + " ".join(options.features)
        raise AssertionError(f"{again}\nstep {run.steps} of {run}\n{error}") from error
    captures = run.target.counters.captures
    with_graphs = run.drawn.mode != "NONE" or not run.drawn.traced
    return Counter(
        programs=1,
        steps=options.steps,
        graph_steps=options.steps * with_graphs,
        captures=captures,
        replays=run.replays,
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


def outcome(seed: int, options: Options) -> tuple[int, Counter[str], str]:
    """Return (seed, counts of :func:`fuzz`, what failed); for a process of its own."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a capture collects garbage: what is there before the program need not be searched
    try:
        return seed, fuzz(seed, options), ""
    except AssertionError as error:
        return seed, Counter(), str(error)
