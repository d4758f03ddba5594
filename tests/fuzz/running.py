"""Runs one random program over a schedule of steps and compares each with eager: :func:`fuzz`.

Compared are the results, all inputs, all buffers, and results of earlier steps that the caller
owns. The reference is a deep copy of the model that runs in eager with copies of the inputs.
"""

import copy
import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import library
from torch import nn
from torch.utils._pytree import tree_leaves

import cgcompile
from cgcompile import BatchDescriptor, CompilationConfig, CUDAGraphMode, set_forward_context
from cgcompile.errors import TraceError
from fuzz.programs import FEATURES, USUAL, WIDTH, draw

FRONT_ENDS = (
    "torch.compile",
    "cgcompile.compile",
    "cgcompile.compile",
    "CUDAGraphWrapper",
    "BreakableCUDAGraphWrapper",
)
REGIONS = ("regions", "alias_boundaries")  # what only a traced program can have
ROWS = (1, 3, 4, 6)
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
    features: tuple[str, ...] = USUAL
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
    chance: random.Random = field(repr=False)


def drawn(seed: int) -> Draw:
    chance = random.Random(seed * 7919 + 1)
    front_end = chance.choice(FRONT_ENDS)
    return Draw(
        seed,
        front_end,
        chance.choice(("PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "NONE")),
        chance.choice(("keep", "shape", "none")),
        chance.random() < 0.5,
        front_end in FRONT_ENDS[3:] or chance.random() < 0.4,
        chance,
    )


class Run:
    """One program behind one front end, beside its reference."""

    def __init__(self, seed: int, options: Options) -> None:
        library()
        self.options = options
        self.drawn = drawn(seed)
        wrapped = self.drawn.front_end in FRONT_ENDS[3:]
        features = [name for name in options.features if not (wrapped and name in REGIONS)]
        self.model = draw(seed, tuple(features)).to(options.device)
        self.reference = copy.deepcopy(self.model)
        self.exact = options.compiler == "eager"
        self.static: dict[tuple[int, str], torch.Tensor] = {}
        self.kept: list[tuple[Any, Any]] = []
        self.replays = self.steps = 0
        self._build(wrapped)

    def _build(self, wrapped: bool) -> None:
        drawn = self.drawn
        mode = "FULL" if wrapped else drawn.mode
        config = CompilationConfig(
            capture_device="host" if self.options.device == "cpu" else "auto",
            compiler=self.options.compiler,
            cache_dir="off",
            cudagraph_mode=mode,
            splitting_ops=() if wrapped else ("cgtest::scale_",),
        )
        self.mode = CUDAGraphMode.FULL if wrapped else CUDAGraphMode.PIECEWISE
        if wrapped:
            self.target = getattr(cgcompile, drawn.front_end)(self.model, config, self.mode)
            self.call = self.target
            return
        self.target = cgcompile.Backend(config)
        if drawn.front_end == "torch.compile":
            torch._dynamo.reset()
            self.call = torch.compile(self.model, backend=self.target, dynamic=True)
        else:
            dims = {"x": 0, "cache": 0}
            self.call = cgcompile.compile(
                self.model, self.target, dynamic_dims=dims, guards=drawn.guards
            )

    # -------------------------------------------------------------- one step

    def step(self) -> None:
        """Run one step in both, and compare.

        Raises:
            AssertionError: they differ.
        """
        self.steps += 1
        self._between_steps()
        rows = self.drawn.chance.choice(ROWS)
        x, cache = self._input("x", rows), self._input("cache", rows)
        others = x.clone(), cache.clone()
        grad = torch.inference_mode if self.drawn.inference else torch.no_grad
        with grad():
            expected = self.reference(*others)
            before = self.target.counters.replays
            with self._context(rows):
                actual = self.call(x, cache)
            replayed = self.target.counters.replays > before
        self.replays += replayed
        self._compare(actual, expected, "result")
        self._compare((x, cache), others, "inputs")
        self._compare(dict(self.model.named_buffers()), dict(self.reference.named_buffers()), "buf")
        self._look_at_kept(actual, x, cache)

    def _between_steps(self) -> None:
        chance = self.drawn.chance
        what = chance.random()
        with torch.no_grad():
            if what < 0.03:
                noise = torch.randn(WIDTH, WIDTH, device=self.options.device)
                for model in (self.model, self.reference):
                    model.first.weight.mul_(0.9).add_(noise, alpha=0.1)
            elif what < 0.06:
                noise = torch.rand(WIDTH, device=self.options.device)
                for model in (self.model, self.reference):
                    model.state.copy_(noise)
            elif what < 0.065 and self._may_replace:
                weight = torch.randn(WIDTH, WIDTH, device=self.options.device) * 0.3
                for model in (self.model, self.reference):
                    model.second.weight = nn.Parameter(weight.clone(), requires_grad=False)
            elif what < 0.068:
                self.kept.clear()
                release = self.target.clear_graphs if self._wrapped else self.target.release
                release()

    @property
    def _wrapped(self) -> bool:
        return self.drawn.front_end in FRONT_ENDS[3:]

    @property
    def _may_replace(self) -> bool:
        guarded = self.drawn.front_end == "torch.compile" or self.drawn.guards == "keep"
        return not self._wrapped and guarded and not self.drawn.context

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
        if self.drawn.context:
            return
        for result, copied in self.kept:
            torch.testing.assert_close(
                result, copied, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"kept: {text}"
            )
        shared = {each.untyped_storage().data_ptr() for each in (*inputs, *self.model.buffers())}
        own = [
            leaf for leaf in tree_leaves(actual) if leaf.untyped_storage().data_ptr() not in shared
        ]
        self.kept = [*self.kept[1 - KEPT :], (own, [leaf.clone() for leaf in own])]

    def __str__(self) -> str:
        lines = [f"    {op}({i}, {j})" for op, i, j in self.model.steps]
        return "\n".join((f"{self.drawn}", *lines, f"    returns {self.model.returns}"))


def fuzz(seed: int, options: Options) -> Counter[str]:
    """Run the program of a seed.

    Returns:
        How many programs, steps, captures and replays there were.

    Raises:
        AssertionError: something differs from eager; the text reproduces it.
    """
    run = Run(seed, options)
    torch.manual_seed(seed)
    try:
        for _ in range(options.steps):
            run.step()
    except TraceError:  # torch fixes a size for some writes, which is an error with a name
        return Counter(refused=1)
    except Exception as error:
        unknown = "" if set(options.features) <= set(FEATURES) else " (unknown feature)"
        again = f"python -m fuzz --reproduce {seed} --compiler {options.compiler}"
        raise AssertionError(f"{again}{unknown}\nstep {run.steps} of {run}\n{error}") from error
    captures = run.target.counters.captures
    with_graphs = run.drawn.mode != "NONE" or run._wrapped
    return Counter(
        programs=1,
        steps=options.steps,
        graph_steps=options.steps * with_graphs,
        captures=captures,
        replays=run.replays,
    )


def outcome(seed: int, options: Options) -> tuple[int, Counter[str], str]:
    """Return (seed, counts of :func:`fuzz`, what failed); for a process of its own."""
    torch.set_num_threads(1)
    try:
        return seed, fuzz(seed, options), ""
    except AssertionError as error:
        return seed, Counter(), str(error)
