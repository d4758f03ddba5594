"""The eager breaks of a breakable capture: where they are, and what goes in and out.

:class:`BreakMode` is a dispatch mode around each segment that finds splitting ops while they run.
Without it an attention op under no decorator would be captured, and its metadata with it. It sees
the ops of the thread that captures, those in the Python kernels of other ops and those that a
compiled model calls included. :func:`foreign_breaks` finds breaks that were written for Meta's
``piecewise-cuda-graphs``: functions under its ``no_graph`` read from a context variable of that
package whether a capture runs. Nothing is imported, and nothing of that package is changed.

:func:`held` and :class:`Containers` are about the arguments of a break. A result of it is copied to
where graphs read it, and usually dies then. One that the program keeps, such as a cache, exists
twice; where either is written, the other is stale: :class:`Original` finds that.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries, SplittingOp
from cgcompile.errors import CaptureError
from cgcompile.graphs.arena import Block, address, numbers_as_bytes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, by name."""


def held(arguments: Arguments, owns: Callable[[torch.Tensor], bool]) -> Arguments:
    """Return arguments as a segment keeps them.

    Tensors whose memory the recording owns are held weakly, or it could not be used again.
    """

    def keep(leaf: Any) -> Any:
        ours = isinstance(leaf, torch.Tensor) and address(leaf) and owns(leaf)
        return compat.weak_tensor(leaf) if ours else leaf

    with compat.outside_inference_mode():  # once for all that is held weakly
        kept: Arguments = compat.tree_map(keep, arguments)
    return kept


def transform_around(arguments: Arguments) -> str | None:
    """The transform of ``torch.func`` that lets no break run; None if there is none.

    Under ``vmap`` the arguments may be ordinary tensors, which are not mapped.
    """
    transform = compat.functorch_transform()
    if transform == "Vmap" and not any(map(compat.is_wrapped, compat.tree_tensors(arguments))):
        return None
    return transform


class Containers:
    """The arguments of a break, to be compared with themselves after it.

    A function cannot change the tuple and the dict that its arguments come in, so without a
    container among them there is nothing to compare. ``leaves`` are those before the break.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.leaves = compat.tree_leaves(arguments)
        args, kwargs = arguments
        nested = any(map(compat.is_container, (*args, *kwargs.values())))
        self._spec = compat.tree_spec(arguments) if nested else None

    @property
    def changed(self) -> bool:
        if self._spec is None:
            return False
        now = compat.tree_leaves(self._arguments)
        if compat.tree_spec(self._arguments) != self._spec:
            return True
        return any(map(operator.is_not, now, self.leaves))


class Original:
    """A result of a break that was copied into a block, while the program keeps it.

    Both tensors are held weakly. Used on the stream that breaks run on.
    """

    def __init__(
        self,
        name: str,
        life: compat.StorageLife,
        source: torch.Tensor,
        bridge: torch.Tensor,
        block: Block,
    ) -> None:
        self.name = name
        self.life = life
        self._source = source
        self._bridge = bridge
        self._block = block
        self._was = numbers_as_bytes(source).clone()

    @property
    def is_stale(self) -> bool:
        """Whether the original or its copy has been written; synchronises."""
        if not torch.equal(numbers_as_bytes(self._source), self._was):
            return True
        return self._block.is_lent and not torch.equal(numbers_as_bytes(self._bridge), self._was)


class Recorder(Protocol):
    """What foreign breaks interrupt."""

    @property
    def is_recording(self) -> bool:
        """Whether it is outside of any break."""

    def pause(self, name: str) -> AbstractContextManager[None]:
        """What runs inside is in no segment; on an exception the recording is lost."""

    def add_eager(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """While it is paused: run the function here at each replay."""


@contextmanager
def foreign_breaks(recorder: Recorder) -> Iterator[None]:
    """Within it, in this thread, functions under ``no_graph`` break what a recorder records.

    They return no CUDA tensors; their own package refuses that.
    """
    listener = _Listener(recorder)
    with ExitStack() as stack:
        stack.push(listener.leave)  # the last: what it restores was there before
        stack.enter_context(compat.listen_to_no_graph(listener))
        yield


class _Listener:
    """The methods that ``no_graph`` calls, by its names for them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pause: ExitStack | None = None
        self._inside = 0  # breaks within a break, which are none

    def _end_segment(self) -> None:
        if self._pause is not None or not self._recorder.is_recording:
            self._inside += 1
            return
        with ExitStack() as stack:
            stack.enter_context(self._recorder.pause("a function under no_graph"))
            self._pause = stack.pop_all()

    def _insert_eager(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._inside:
            self._recorder.add_eager(fn, args, kwargs)

    def _begin_segment(self) -> None:
        if self._inside:
            self._inside -= 1
            return
        pause, self._pause = self._pause, None
        assert pause is not None
        pause.close()

    def leave(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End a break whose function raised: ``no_graph`` does not."""
        pause, self._pause = self._pause, None
        if pause is not None:
            lost = error or RuntimeError("a function under no_graph raised")
            pause.__exit__(type(lost), lost, trace)


_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default  # what the math kernel of it calls


class Breaker:
    """Base of what runs the splitting ops and the decorated functions of a step."""

    @property
    def is_recording(self) -> bool:
        """Whether it is outside of any break."""
        raise NotImplementedError

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a splitting op that is called, in a break or not, and return its result."""
        raise NotImplementedError

    def pass_by(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that another op is about to be called."""

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function that breaks and return its result."""
        raise NotImplementedError


class BreakMode(compat.DispatchMode):
    """Pass each op of the segments of one capture to a breaker.

    Args:
        breaker: what runs splitting ops.
        boundaries: which ops are splitting ops.
        tensor_type: the device type of the tensors that are captured.
        sees_composites: whether an op such as SDPA arrives whole, whichever kernel it takes.
    """

    def __init__(
        self, breaker: Breaker, boundaries: Boundaries, tensor_type: str, sees_composites: bool
    ) -> None:
        super().__init__()
        self._breaker = breaker
        self._boundaries = boundaries
        self._tensor_type = tensor_type
        self._sees_composites = sees_composites
        self._known: dict[Any, _Known] = {}
        self._sdpa_breaks = boundaries.match_call(_SDPA) is not None
        self._on = False  # whether it is on torch's stack of modes
        self._kept_by_torch = False  # whether torch puts it there again by itself

    def switch_on(self) -> None:
        if not self._kept_by_torch and not self._on:
            super().switch_on()
            self._on = True

    def switch_off(self) -> None:
        if not self._on:
            return
        top = compat.top_mode()
        if top is not self:
            raise CaptureError.mode_in_between(found=type(top).__name__)
        self._on = False
        super().switch_off()

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._kept_by_torch
        self._on, self._kept_by_torch = False, True
        try:
            return self._call(func, args, kwargs)
        finally:
            self._on, self._kept_by_torch = True, before

    def _body(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the Python kernel of an op, and see the ops in its body."""
        self._kept_by_torch = False
        self.switch_on()
        try:
            return kernel(*args, **kwargs)
        finally:
            self.switch_off()  # a capture that was abandoned has done so
            self._kept_by_torch = True

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known.get(func) or self._look_up(func, args)
        if known.entry is not None:
            return self._breaker.meet(known.entry, func, args, kwargs)
        if func is _SAFE_SOFTMAX and self._sdpa_breaks and not self._sees_composites:
            raise CaptureError.math_attention()
        self._breaker.pass_by(func, args, kwargs)
        if known.kernel is None:
            return func(*args, **kwargs)
        return self._body(known.kernel, args, kwargs)

    def _look_up(self, func: Any, args: tuple[Any, ...]) -> "_Known":
        """Look an op up once: a segment calls dozens."""
        op = compat.functionalized_op(func, args)
        kernel = compat.python_kernel(func, self._tensor_type)
        known = _Known(self._boundaries.match_call(op or func), kernel)
        if op is None:  # else the next call may be that of another op
            self._known[func] = known
        return known


class _Known(NamedTuple):
    """What an op is registered as, unless it is captured, and its kernel if written in Python."""

    entry: SplittingOp | None
    kernel: Callable[..., Any] | None


class Makers(compat.DispatchMode):
    """Note the memory that ops make, to find what a break leaves behind; for debugging."""

    def __init__(self, tensor_type: str) -> None:
        super().__init__()
        self._tensor_type = tensor_type
        self._lives: dict[int, compat.StorageLife] = {}

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = compat.python_kernel(func, self._tensor_type)
        if kernel is not None:
            with self:
                made = kernel(*args, **kwargs)
        else:
            made = func(*args, **kwargs)
        known = {address(leaf) for leaf in _dense((args, kwargs))} | {0}
        for leaf in _dense(made):
            if address(leaf) not in known:
                self._lives[address(leaf)] = compat.StorageLife(leaf)
        return made

    @property
    def alive(self) -> dict[int, compat.StorageLife]:
        """The lives of the memory that was made here and is in use, by address."""
        return {start: life for start, life in self._lives.items() if not life.ended}


def _dense(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in compat.tree_tensors(tree) if leaf.layout is torch.strided]
