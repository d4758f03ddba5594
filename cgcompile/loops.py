"""Steps of a stateful model in one call: :func:`loop`.

What a decode loop costs beside the model is one wait for the device per token, and Python between
the steps. A :class:`Loop` runs a *round* of k steps without either. By default one step is one
graph, which a round replays k times; the inputs of a replay are compared once a round, since no
code of the program runs between its replays. With ``unroll`` k steps are one graph. Whether all
requests are finished is computed on the device once a round, and read one round later.

The rule: a step changes tensors of its state, in place, and nothing else. Anything else that a
captured step changes would not change at a replay, so it is a ``LoopStateError``.

A loop holds a :class:`~cgcompile.graphs.wrapper.CUDAGraphWrapper` around its step, whose guards,
counters and tools are those of the loop. A round is one or more calls of the step table.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import BatchDescriptor
from cgcompile.errors import (
    CaptureBusyError,
    CaptureError,
    CGCompileError,
    ConfigError,
    GuardError,
    LoopRoomError,
    LoopStateError,
    with_article,
)
from cgcompile.graphs.capture import SameStorages, bulk_captures, postponed_capture
from cgcompile.graphs.contract import Contract, is_plain_value
from cgcompile.graphs.fields import Fields
from cgcompile.graphs.guards import read_arguments
from cgcompile.graphs.reads import Transparent
from cgcompile.graphs.results import flatten, rebuilt
from cgcompile.graphs.steps import check_here
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.wrapper import (
    Captured,
    CUDAGraphEntry,
    CUDAGraphWrapper,
    WrapperCall,
)
from cgcompile.reasons import Counters, Fallback, Reason, RunPlain
from cgcompile.settings import checked_but, require, require_callable, whole
from cgcompile.torch_compat.raw_memory import is_plain_tensor, storage_identity

Limit = int | Callable[[Any], int]
"""How many steps there is room for: a number, or a function of the state."""


_MOST_CAPTURES = 4  # of one step: each may run code whose reads were not watched before


class _Stack:
    """What the steps of a round returned, stacked along a new first dimension."""

    def __init__(self, steps: int) -> None:
        self._steps, self._count = steps, 0
        self._result: Any = None  # of the last step
        self._leaves: list[Any] = []  # of the last step
        self._first: tuple[Any, Any] = (None, None)  # layouts and structure of the first result
        self._stacked: list[torch.Tensor] = []  # of each tensor leaf
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of these and those leaves

    def add(self, result: Any) -> None:
        """Copy what a step returned: the next one may write the same memory."""
        self._take(result)
        self.add_again()

    def add_again(self) -> None:
        """Copy the tensors that the last step returned, which a replay has written again."""
        count = self._count
        for stacked, leaf in self._pairs:
            stacked[count].copy_(leaf)
        self._count = count + 1

    def _take(self, result: Any) -> None:
        self._result, (self._leaves, structure) = result, flatten(result)
        for leaf in self._leaves:
            if isinstance(leaf, (GeneratorType, CoroutineType, AsyncGeneratorType)):
                raise ConfigError.impossible(
                    what=f"a loop whose step returns {with_article(type(leaf).__name__)}",
                    because="its code has not run, and would run outside of the graph",
                    instead="Make the step a function without yield and await, which returns "
                    "tensors.",
                )
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        layouts = [(tuple(leaf.shape), leaf.dtype) for leaf in tensors]
        if not self._count:
            self._stacked = [leaf.new_empty((self._steps, *leaf.shape)) for leaf in tensors]
            self._first = layouts, structure
        if (layouts, structure) != self._first:
            now, before = layouts, self._first[0]
            raise LoopStateError.returns(step=self._count, now=now, before=before)
        self._pairs = [*zip(self._stacked, tensors, strict=True)]

    def result(self) -> Any:
        """Return the stacked tensors in the structure of the last result."""
        stacked = iter(self._stacked)
        leaves = [next(stacked) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return rebuilt(self._result, leaves)


class _Steps(Transparent):
    """The step of a loop as a callable of the state; with ``count`` as many steps, stacked."""

    def __init__(self, step: Callable[..., Any], numbered: bool) -> None:
        self.runnable, self._numbered = step, numbered

    def __call__(self, state: Any, count: int = 0) -> Any:
        if not count:
            return self.runnable(state)
        stack = _Stack(count)
        for number in range(count):
            stack.add(self.runnable(state, number) if self._numbered else self.runnable(state))
        return stack.result()

    def unwrap(self) -> Any:
        return self.runnable


class _StepWrapper(CUDAGraphWrapper):
    """A wrapper around the step of a loop, which may change nothing but tensors of its state."""

    def unwrap(self) -> Any:
        """Return the step itself, through wrappers in wrappers."""
        step: Any = self.runnable
        while isinstance(step, Transparent):
            step = step.unwrap()
        return step

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        storages: SameStorages | None = None,
        wait: bool = True,
        shown: str = "",
    ) -> Captured:
        """Capture the step.

        Raises:
            LoopStateError: it changes something else than tensors of its state, in place.
        """
        reached = self._reached(args)
        try:
            with bulk_captures():  # of which the garbage is collected once
                for _ in range(_MOST_CAPTURES):
                    captured = self._recorded(descriptor, args, kwargs, storages, wait, shown)
                    if self._state is None or not self._state.learned:
                        return captured
                    # It ran code that was not known: what that reads was not read before it.
                    self._state.forget()
        except LoopStateError:
            self._state = None  # else the next capture would begin with the changed values
            for fields in reached:
                fields.restore()
            raise
        detail = f"{self.name} runs other code at each capture"
        raise RunPlain(Fallback(Reason.CAPTURE_FAILED, detail))

    def _recorded(
        self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any
    ) -> Captured:
        """Capture the step, and compare what it reaches with what that was before."""
        assert self.pool is not None
        state, drawn = read_arguments(args, kwargs, self.pool.device.tensor_type), random.getstate()
        written = self._written(*self._reached(args))
        try:
            captured = super().record(descriptor, args, kwargs, *more)
            if random.getstate() != drawn:
                random.setstate(drawn)
                path, before = "what Python's random module draws next", "one number"
                raise LoopStateError.changes(
                    what=self.name, path=path, before=before, after="another"
                )
            self._check_changes(state, args, kwargs, written)
        except CaptureError as error:
            if not error.field:
                raise
            path = _in_state(error.field)
            raise LoopStateError.rebinds(what=self.name, path=path) from error
        return captured

    def _check_changes(
        self,
        state: Contract,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Iterator[tuple[str, str]],
    ) -> None:
        """Raise LoopStateError if the captured step has changed what it must not."""
        change = None if state.holds(args, kwargs) else state.first_change(args, kwargs)
        # Changes count only if the capture ran no new code, whose reads were not watched.
        if change is None and self._state is not None and not self._state.learned:
            change = next(iter(self._state.changes), None)
        if change is not None and change.moved:
            raise LoopStateError.rebinds(what=self.name, path=_in_state(change.path))
        if change is not None:
            path, before, after = _in_state(change.path), change.before, change.after
            raise LoopStateError.changes(what=self.name, path=path, before=before, after=after)
        for path, where in written:
            raise LoopStateError.writes(what=self.name, path=path, where=where)

    def _read_state(self) -> None:
        super()._read_state()
        if self._state is not None:
            self._state.captures_again = True

    def _reached(self, args: tuple[Any, ...]) -> tuple[Fields, Fields]:
        """Return the fields of the state, and those of the step and of globals that it reads."""
        roots = {"step": self.unwrap()}
        if self._state is not None:
            roots |= self._state.loaded_globals
        return Fields({"input 0": args[0]}), Fields(roots)

    def _written(self, of_state: Fields, of_step: Fields) -> Iterator[tuple[str, str]]:
        """Yield, later, the paths of tensors that were written and must not be, and where they are.

        A graph writes neither what is not in the state, nor what is on another device.
        """
        assert self.pool is not None
        # Tensors inside of a tensor subclass are named, too.
        state, others = (
            [row for row in fields.named if is_plain_tensor(row[1])]
            for fields in (of_state, of_step)
        )
        kind, own = self.pool.device.tensor_type, {_memory(tensor) for _, tensor in state}
        compared = [(row, "not in its state") for row in others]
        compared = [row for row in compared if _memory(row[0][1]) not in own]
        compared += [
            (row, f"on the {row[1].device}") for row in state if row[1].device.type != kind
        ]
        before = [(row, row[0][1]._version) for row in compared if not row[0][1].is_inference()]
        return (
            (_in_state(path), where)
            for ((path, tensor), where), version in before
            if tensor._version != version
        )


def _memory(tensor: torch.Tensor) -> int:
    return storage_identity(tensor.untyped_storage())


def _in_state(path: str) -> str:
    """Return a path in the state, which is the first argument of the wrapped callable."""
    return path.replace("input 0", "state", 1)


class _Round:
    """A round of a loop: how many steps it still has to run, and what they returned."""

    def __init__(self, loop: "Loop", state: Any, steps: int) -> None:
        self.loop, self.state, self.steps, self.left = loop, state, steps, steps
        self.stack = _Stack(steps)
        self._result: Any = None  # of an unrolled round

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the wrapped callable."""
        return (self.state, self.steps) if self.loop.unroll else (self.state,)

    def add(self, result: Any) -> None:
        """Take what one call of the wrapped callable returned."""
        if self.loop.unroll:
            self._result, self.left = result, 0
        else:
            self.stack.add(result)
            self.left -= 1

    def result(self) -> Any:
        return self._result if self.loop.unroll else self.stack.result()


class _RoundCall(WrapperCall):
    """A part of a round: steps that run plain, a step that is captured, or replays to the end."""

    __slots__ = ("_leaves", "_round", "_runs")

    of_a_loop = True
    _wrapper: _StepWrapper

    def __init__(self, wrapper: _StepWrapper, part: _Round) -> None:
        super().__init__(wrapper, part.arguments, {})
        self._round, self._runs = part, 0
        self._leaves = flatten(part.state)[0]
        self.descriptor = BatchDescriptor(_rows(self._leaves))

    def enter(self) -> None:
        if self.context is None:
            check_here()
            mode = CUDAGraphMode.FULL
        else:
            super().enter()
            mode, _ = self.key
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        layouts = tuple(map(self._round.loop.layout, self._leaves))
        self.key = mode, self.descriptor, modes, self._args[1:], layouts

    def compare(self, step: CUDAGraphEntry) -> None:
        try:
            super().compare(step)
        except GuardError:
            args, kwargs = self._args, self._kwargs
            change = None if step.guard is None else step.guard.first_change(args, kwargs)
            if change is None:
                raise
            change = change._replace(path=_in_state(change.path))
            raise change.error(self._wrapper.name, self.descriptor, "loop") from None

    def replay(self, step: CUDAGraphEntry) -> Any:
        part, replay = self._round, step.sequence.replay
        args, kwargs = self._compared
        result = step.result(args, kwargs)  # the tensors of all replays
        if part.loop.unroll:
            replay(self._compared)
            part.add(_owned(result))
            return
        replay(self._compared)
        part.stack.add(result)
        add_again = part.stack.add_again
        for _ in range(part.left - 1):
            replay(self._compared)
            add_again()
        self._wrapper.timeline.replays += part.left - 1
        part.left = 0

    def check_due(self) -> None:
        wrapper, warmed = self._wrapper, self._round.loop.warmed
        most = wrapper.config.max_captured_shapes
        if sum(1 for _ in self.steps) >= most:
            detail = f"{most} rounds are captured (max_captured_shapes)"
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))
        if warmed[self.key] < wrapper.config.num_warmups:
            if len(warmed) > most:  # of shapes that do not come again
                warmed.clear()
            warmed[self.key] += 1
            raise RunPlain(Fallback(Reason.WARMING, f"a first step for {self.descriptor}"))

    def record(self) -> tuple[CUDAGraphEntry, Any]:
        try:
            entry, result = super().record()
        except (RunPlain, LoopStateError, CaptureBusyError):
            raise
        except Exception as error:  # nothing has run; a plain step raises its own error
            text = str(error).partition("\n")[0]
            name = "" if isinstance(error, CGCompileError) else f"{type(error).__name__}: "
            raise RunPlain(Fallback(Reason.CAPTURE_FAILED, name + text)) from None
        self._round.add(_owned(result) if self._round.loop.unroll else result)
        self._round.loop.remember(self._leaves)
        return entry, None

    def plain(self, why: Fallback) -> Any:
        part, warms = self._round, why.reason is Reason.WARMING
        self._runs = 1 if warms or part.loop.unroll else part.left
        with postponed_capture() if warms else nullcontext():
            for _ in range(self._runs):
                part.add(self._wrapper.runnable(*self._args))

    def count(self, timeline: Timeline, why: Fallback) -> None:
        for _ in range(self._runs):
            timeline.plain(why, self.descriptor if self.context is None else "")


def _owned(result: Any) -> Any:
    """Return a result whose tensors are copies: the next round overwrites memory of graphs."""
    leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in flatten(result)[0]]
    return rebuilt(result, leaves)


class _Flag:
    """Whether all requests are finished: copied to the host, and read later without a wait."""

    def __init__(self, value: Any) -> None:
        kinds = (torch.Tensor, bool)
        require(isinstance(value, kinds), "until()", "Loop", value, "a tensor or a bool")
        self._event: torch.cuda.Event | None = None
        self.is_tensor = isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            value = value.detach().all()
            if value.is_cuda:
                stream = torch.cuda.current_stream(value.device)
                pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
                value = pinned.copy_(value, non_blocking=True)
                self._event = stream.record_event()
        self._value = value

    @property
    def is_pending(self) -> bool:
        """Whether the host would have to wait for it."""
        return self._event is not None

    def read(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)


class Loop(Transparent):
    """Rounds of steps of a stateful model; see :func:`loop`.

    Attributes that it does not have are read from the step.

    Attributes:
        steps: how many steps a round has.
        unroll: whether the steps of a round are one graph.
        wrapper: the wrapper that holds the graphs; ``wrapper.entries`` lists them.

    Example:
        >>> def step(state):
        ...     state["x"].mul_(2)
        ...     return state["x"]
        >>> double = cgcompile.loop(step, steps=3)
        >>> double({"x": torch.ones(1)}).flatten().tolist()
        [2.0, 4.0, 8.0]
    """

    def __init__(
        self,
        step: Callable[..., Any],
        steps: int,
        until: Callable[[Any], Any] | None,
        unroll: bool,
        wrapper: _StepWrapper,
    ) -> None:
        self.steps, self.unroll, self.wrapper = steps, unroll, wrapper
        self.warmed: Counter[Any] = Counter()  # warm-ups by key
        self.runnable, self._until = step, until
        # Objects in captured states, by identity, with the layouts of the tensors in them.
        self._layouts: dict[int, tuple[Any, Any]] = {}

    def __call__(self, state: Any, steps: int | None = None, *, limit: Limit | None = None) -> Any:
        """Run one round.

        Args:
            state: what the steps read and write: tensors in dicts, lists, tuples, dataclasses and
                other objects, such as a cache of ``transformers``.
            steps: how many steps this round has, if not those of the loop.
            limit: how many steps there is room for: a number, or a function of ``state``.

        Returns:
            What the steps returned: each tensor stacked along a new first dimension, [steps, ...],
            in memory of the caller's; other values as the last step returned them.

        Raises:
            LoopStateError: a step changes something else than tensors of ``state``, in place.
            LoopRoomError: the round has more steps than ``limit`` has room for.
            AddressChangedError: a tensor of ``state`` has another address than at the capture.
            HostValueChangedError: another value or object in ``state`` than at the capture.
            DispatchError: another thread has run rounds; or, with ``on_fallback="raise"``, a step
                cannot be captured.
            ConfigError: the step returns a generator or a coroutine, whose code has not run.
            BaseException: what a step raised, unchanged.
        """
        count = self.steps if steps is None else steps
        require(type(count) is int and count > 0, "steps", "Loop", steps, "a number of at least 1")
        room = _room(limit, state)
        if room is not None and count > room:
            raise LoopRoomError.full(what=self.wrapper.name, steps=count, room=max(room, 0))
        if is_dynamo_compiling():
            return self.wrapper.runnable(state, count)
        part = _Round(self, state, count)
        while part.left:
            self.wrapper.step_table.run(_RoundCall(self.wrapper, part))
        return part.result()

    def rounds(self, state: Any, limit: Limit | None = None) -> Iterator[Any]:
        """Run rounds until ``until`` holds for all, or there is no room; yield what each returned.

        Whether all are finished is read one round late, while the next round runs. So up to
        2 * steps - 1 steps run after the last one that was needed; they must write nothing that
        matters. What such a round returned is not yielded. Without graphs it is read at once.

        Args:
            state: as of a call.
            limit: how many steps to run at most, of which the last round may have fewer. A function
                of the state is called once, and is the room that there is: where that ends before
                all are finished is an error.

        Yields:
            What a round returned.

        Raises:
            LoopRoomError: the room that the function ``limit`` returned is used up.
        """
        room = _room(limit, state)
        flag: _Flag | None = None  # of the round before
        while room is None or room > 0:
            count = self.steps if room is None else min(self.steps, room)
            result = self(state, count)
            if flag is not None and flag.read():
                return
            room = None if room is None else room - count
            flag = None if self._until is None else _Flag(self._until(state))
            yield result
            if flag is not None and not self._reads_late(flag) and flag.read():
                return
        if callable(limit) and self._until is not None and not (flag is not None and flag.read()):
            raise LoopRoomError.full(what=self.wrapper.name, steps=self.steps, room=0)

    def _reads_late(self, flag: _Flag) -> bool:
        has_graphs = bool(self.wrapper.captured_steps.captured)
        return flag.is_pending or (flag.is_tensor and has_graphs)  # as on a GPU

    @property
    def counters(self) -> Counters:
        """What its steps did so far; a copy. An unrolled round counts as one step."""
        return self.wrapper.counters

    def unwrap(self) -> Any:
        """Return the step."""
        return self.runnable

    def release(self) -> None:
        """Drop the graphs and their memory. The next round captures again."""
        self.wrapper.clear_all_graphs()
        self.warmed.clear()
        self._layouts.clear()

    def __repr__(self) -> str:
        how = "unrolled" if self.unroll else "replays of one"
        captured = f"{len(self.wrapper.entries)} captured"
        return f"Loop({self.wrapper.name}, {self.steps} steps, {how}, {captured})"

    # -------------------------------------------------------------- which graph

    def layout(self, leaf: Any) -> Any:
        """Return the layout of a leaf of a state, a part of the key; addresses are compared."""
        if isinstance(leaf, torch.Tensor):
            return leaf.shape, leaf.dtype
        if is_plain_value(leaf):
            return None
        known = self._layouts.get(id(leaf))
        if known is not None:
            return known[1]
        return tuple([(t.shape, t.dtype) for t in Fields({"": leaf}).tensors])

    def remember(self, leaves: Sequence[Any]) -> None:
        """Keep the layouts of objects in a captured state, whose contract keeps the objects."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and not is_plain_value(leaf):
                self._layouts[id(leaf)] = leaf, self.layout(leaf)


def _rows(leaves: Sequence[Any]) -> int:
    """Return the rows of the first tensor that has any."""
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    return int(next(sizes, 0))


def _room(limit: Limit | None, state: Any) -> int | None:
    """Return how many steps a limit has room for."""
    room = limit(state) if callable(limit) else limit
    if room is None:
        return None
    number = whole(room)
    require(
        number is not None, "limit", "Loop", room, "a whole number, or a function returning one"
    )
    return number


@checked_but("step", "until")
def loop(
    step: Callable[..., Any],
    steps: int = 8,
    until: Callable[[Any], Any] | None = None,
    unroll: bool | None = None,
    generator: torch.Generator | None = None,
    config: CompilationConfig | None = None,
) -> Loop:
    """Return a callable that runs several steps of a stateful model at once, on CUDA graphs.

    A call runs a round of ``steps`` steps. The first round of a state runs one step plain, captures
    the next one and replays that; later rounds replay. The graph reads and writes the
    state where it was, so the state must stay at its address: write into its tensors. A state of
    other shapes gets a graph of its own. The graph is that of grad mode and inference mode at the
    capture; another mode gets its own, too.

    Steps that cannot be captured run plain, with a reason in ``counters``; so do all steps on a
    CPU. Inside of another capture they become part of it.

    Args:
        step: ``step(state)``, which writes the tensors of ``state`` in place and changes nothing
            else; or ``step(state, number)``, whose number in the round is a Python int. A module, a
            compiled model, a wrapper or a function. Rows that are finished must stay as they are.
        steps: how many steps a round has.
        until: ``until(state)`` returns whether all are finished: a tensor, all of which must be
            true, or a bool. :meth:`~cgcompile.loops.Loop.rounds` ends there.
        unroll: whether the steps of a round are one graph; by default where ``step`` takes a
            number. It saves a launch for each step but one, and pays off for tiny steps.
        generator: from which the steps draw random numbers beside the default generator.
        config: ``on_fallback``, ``capture_device`` and others; left out: environment and defaults.

    Returns:
        The loop.

    Raises:
        ConfigError: an argument is of another kind than above.

    Example:
        >>> def step(state):
        ...     state["n"].add_(1).clamp_(max=4)
        ...     return state["n"]
        >>> state = {"n": torch.zeros(2, dtype=torch.long)}
        >>> count = cgcompile.loop(step, steps=2, until=lambda state: state["n"] == 4)
        >>> [out.tolist() for out in count.rounds(state)]
        [[[1, 1], [2, 2]], [[3, 3], [4, 4]]]
    """
    require_callable("step", "loop", step)
    require(steps > 0, "steps", "loop", steps, "a number of at least 1")
    if until is not None:
        require_callable("until", "loop", until)
    numbered = _takes_number(step)
    if numbered and unroll is False:
        raise ConfigError.impossible(
            what="loop(unroll=False)",
            because="the step takes its number, which one graph for all steps cannot know",
            instead="Leave unroll out, or count in a tensor of the state.",
        )
    wrapper = _wrapped(step, numbered, generator, config)
    return Loop(step, steps, until, numbered if unroll is None else unroll, wrapper)


def _wrapped(
    step: Callable[..., Any],
    numbered: bool,
    generator: torch.Generator | None,
    config: CompilationConfig | None,
) -> _StepWrapper:
    """Return the wrapper around a step."""
    name = getattr(step, "__name__", None) or type(step).__name__
    wrapper = _StepWrapper(_Steps(step, numbered), config, name=name)
    wrapper.generators = () if generator is None else (generator,)
    wrapper.remedy = "release()"
    return wrapper


def _takes_number(step: Callable[..., Any]) -> bool:
    """Return whether a step takes a second argument, its number."""
    called: Any = step
    while isinstance(called, Transparent) and not isinstance(called, Loop):
        called = called.unwrap()
    called = called.forward if isinstance(called, torch.nn.Module) else called
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in by_position and p.default is p.empty]
    return len(needed) > 1
