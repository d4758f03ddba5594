"""Run a step both ways, plain and replayed, and find the first part that differs.

Graphs repeat what they saw. Where something that varies was frozen by mistake, or memory is used
twice, the result is wrong without an error; :func:`first_difference` and :func:`verify_wrapper`
say where it begins.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile import compat
from cgcompile.boundaries import SplittingOp, target_name
from cgcompile.errors import DispatchError
from cgcompile.forward_context import callers_context, in_full_mode
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.breaks import Breaker, BreakMode
from cgcompile.graphs.capture import capture_turn
from cgcompile.graphs.copies import comparable, flat, numbers_as_bytes
from cgcompile.graphs.entries import CUDAGraphEntry
from cgcompile.graphs.opened import alike, named_values, names_compared, uncompared, value_text
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.graphs.undone import Undone
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.settings import checked

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """The first thing in which a replay is not the plain step.

    Attributes:
        where: the part of the step: a piece, a break, or the result.
        what: which value of it.
        largest: the largest absolute difference of its numbers; NaN where only one is a number,
            and for a value that is no tensor.
        rows: the first rows in which it differs, at most eight.
        detail: in words.
    """

    where: str
    what: str
    largest: float
    rows: tuple[int, ...]
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.detail}"


def first_difference(
    where: str,
    plain: Mapping[str, Any],
    replayed: Mapping[str, Any],
    rtol: float,
    atol: float,
) -> Difference | None:
    """Compare values of the same names; synchronises.

    What nobody can compare is no difference; see :func:`~cgcompile.graphs.opened.uncompared`.

    Args:
        where: the part of the step that has them.
        plain: as the plain step made them.
        replayed: as the replay made them.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.
    """
    for name in names_compared(plain, replayed):
        expected: Any = plain[name]
        found: Any = replayed.get(name)
        tensor = isinstance(expected, torch.Tensor)
        same = _same_kind(found, expected) if tensor else alike(found, expected) is not False
        if name not in replayed or not same:
            now = value_text(found) if name in replayed else "nothing"
            text = f"{now} in the replay, {value_text(expected)} in the plain step"
            return Difference(where, name, float("nan"), (), text)
        if tensor and not _close(found, expected, rtol, atol):
            return _of_numbers(where, name, expected, found, rtol, atol)
    return None


def _same_kind(found: Any, expected: torch.Tensor) -> bool:
    kind = isinstance(found, torch.Tensor)
    return kind and (found.shape, found.dtype) == (expected.shape, expected.dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    if rtol == atol == 0.0:
        return torch.equal(numbers_as_bytes(found), numbers_as_bytes(expected))
    pair = comparable(found), comparable(expected)
    return torch.allclose(*pair, rtol=rtol, atol=atol, equal_nan=True)


def _of_numbers(
    where: str, name: str, plain: torch.Tensor, found: torch.Tensor, rtol: float, atol: float
) -> Difference:
    wide = torch.complex128 if plain.dtype.is_complex else torch.float64
    found, plain = found.to(wide), plain.to(wide)
    wrong = ~torch.isclose(found, plain, rtol=rtol, atol=atol, equal_nan=True)
    if rtol == atol == 0.0 and not found.is_complex():
        wrong |= found.signbit() != plain.signbit()  # -0.0 is not 0.0
    largest = (found - plain).abs()[wrong].max().item() if wrong.any() else 0.0
    flat = wrong.reshape(wrong.shape[0], -1).any(1) if wrong.dim() else wrong.reshape(1)
    rows = tuple(flat.nonzero()[:8, 0].tolist())
    count, total = int(wrong.sum()), wrong.numel()
    text = f"{count} of {total} numbers differ, by up to {largest:.3g}, first in rows {list(rows)}"
    return Difference(where, name, largest, rows, text)


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are now: tensors are copied."""
    with torch.no_grad():
        return {
            name: each.detach().clone() if isinstance(each, torch.Tensor) else each
            for name, each in values.items()
        }


def buffers_of(model: Any) -> list[torch.Tensor]:
    """The buffers of a module, or of the module of a bound method; of anything else none."""
    module = getattr(model, "__self__", model)
    return list(module.buffers()) if isinstance(module, torch.nn.Module) else []


@contextmanager
def put_back(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What happens inside leaves these tensors, and the random generators, as they were."""
    devices = {each.device.index for each in tensors if each.device.type == "cuda"}
    with torch.random.fork_rng(sorted(index for index in devices if index is not None)):
        before = [(each, flat(each.detach()).clone()) for each in tensors if each.numel()]
        try:
            yield
        finally:
            for each, was in before:
                with torch.inference_mode(each.is_inference()), torch.no_grad():
                    flat(each.detach()).copy_(was)


@checked
def verify_wrapper(
    wrapper: CUDAGraphWrapper,
    *args: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
    **kwargs: Any,
) -> Difference | None:
    """Replay a step of a wrapper and run it plain, on the same inputs; compare every break.

    The arguments of each eager break are compared as it leaves them, tensors and plain values, and
    what comes out in the end. Of dataclasses and plain objects what is in them is compared; what
    has no fields and no ``==`` of its own is not, with a line in the log. What the plain step
    changes is put back before the replay: tensors among the arguments, and tensors, attributes and
    containers that the model leads to, weights included. What is written elsewhere, such as a
    global or a cache that the forward context leads to, is written twice. Of a model with compiled
    code all tensors are copied, as nobody sees what that writes; else those that are written, the
    arguments and the buffers. Synchronises.

    Args:
        wrapper: whose step it is.
        *args: as a call takes them, in the forward context of the step.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.
        **kwargs: as a call takes them.

    Returns:
        The first difference, or None.

    Raises:
        DispatchError: no graph serves the step, or the plain step breaks at other places than the
            recorded one.
        GuardError: an input is not that of the capture.
    """
    entry = _entry(wrapper)
    entry.check(args, kwargs, wrapper.name)
    undone = Undone(wrapper.unwrap(), args, kwargs)
    opaque = compat.holds_compiled_code(wrapper.unwrap())
    state = undone.tensors if opaque else buffers_of(wrapper.unwrap())
    breaks = [each for each in entry.sequence.segments if isinstance(each, EagerSegment)]
    with put_back([*compat.tree_tensors((args, kwargs)), *state]), undone:
        watcher = _Watcher(wrapper)
        plain = copies(named_values(watcher.run(args, kwargs)))
    names = [name for name, _ in watcher.seen]
    if wrapper.pool is not None:
        wrapper.pool.follow_stream()
    replayed: list[dict[str, Any]] = []
    for segment, step in zip(entry.sequence.segments, entry.sequence.steps, strict=True):
        step()
        if isinstance(segment, EagerSegment):
            replayed.append(copies(named_values((segment.args, dict(segment.kwargs)))))
    if names != [each.name for each in breaks]:
        raise DispatchError.other_breaks(
            what=wrapper.name, now=names, before=[each.name for each in breaks]
        )
    for place, (name, given) in enumerate(watcher.seen):
        found = first_difference(f"break {place} ({name})", given, replayed[place], rtol, atol)
        if found is not None:
            return found
    output = copies(named_values(entry.output))
    for name in uncompared(plain, output):
        log.warning("%s: %s of the result is not compared: nobody can", wrapper.name, name)
    return first_difference("the result", plain, output, rtol, atol)


def _entry(wrapper: CUDAGraphWrapper) -> CUDAGraphEntry:
    """What serves the step of the forward context."""
    context = callers_context()
    if context is None or context.batch_descriptor is None:
        raise DispatchError.nothing_verified(why="no forward context with a batch descriptor")
    mode, descriptor = context.cudagraph_runtime_mode, context.batch_descriptor
    found = wrapper.entry_of(mode, descriptor)
    if found is None:
        detail = f"{wrapper.name} has nothing for {mode.name}, {descriptor}"
        raise DispatchError.nothing_verified(why=detail)
    return found


class _Watcher(Breaker):
    """Runs a step plain and notes what its breaks are given.

    Attributes:
        seen: name and arguments of each break, in order.
    """

    def __init__(self, wrapper: CUDAGraphWrapper) -> None:
        self.name = wrapper.name
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._wrapper = wrapper
        self._in_break = False

    @property
    def is_recording(self) -> bool:
        return not self._in_break

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        wrapper = self._wrapper
        if not isinstance(wrapper, BreakableCUDAGraphWrapper) or wrapper.pool is None:
            return wrapper.runnable(*args, **kwargs)
        below = wrapper.sees_composites
        composites = below or torch.is_inference_mode_enabled()
        mode = BreakMode(self, wrapper.boundaries, wrapper.pool.device.tensor_type, composites)
        with ExitStack() as stack:
            stack.enter_context(capture_turn(f"verify {self.name}", self))
            stack.enter_context(wrapper.pool.device.around())
            if below:
                stack.enter_context(compat.below_autograd())
            self._mode = mode
            mode.switch_on()
            stack.callback(mode.switch_off)
            return wrapper.runnable(*args, **kwargs)

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`~cgcompile.graphs.breaks.Breaker`."""
        if in_full_mode():
            return op(*args, **kwargs)
        return self.run_eager(target_name(op), op, args, kwargs)

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with all watching off, and note how it leaves its arguments."""
        self._mode.switch_off()
        self._in_break = True
        try:
            made = function(*args, **(kwargs or {}))
            self.seen.append((name, copies(named_values((args, dict(kwargs or {}))))))
            return made
        finally:
            self._in_break = False
            self._mode.switch_on()
