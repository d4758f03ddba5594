"""The capture device of the CPU: a recorder with the rules of CUDA graphs, for tests and for study.

Inside a capture a dispatch mode runs every ATen op, moves its result into a block of the pool and
records it as a :class:`HostStep`. :meth:`HostGraph.replay` runs the steps, into the same memory,
without other code of the host in between. The rules of CUDA hold:

* a graph reads and writes addresses, not tensors; an input that was freed since is an error here;
* pool memory is used again inside a capture and between captures, once no tensor holds it;
* an op that would read a value on the host is refused, in CUDA's words;
* a capture leaves no trace: memory from outside that it wrote is restored, memory it allocated
  holds NaN (integers: a huge number) until the first replay, random numbers are not used up.

A piece that Inductor compiled, a C++ kernel of a custom op and a collective of torch.distributed
are one recorded call each. Of an op whose kernel is written in Python, the ops in its body are
recorded, also where compiled code calls it: see :class:`_Body`. A model that ``torch.compile``
made, inside of a wrapper, runs uncompiled while it is captured here: its kernels do not pass the
dispatcher. Nor do ``Tensor.tolist()`` and ``Tensor.numpy()``, which a profile function of Python
refuses. The gap: where another profiler is active, it stays, and they return what the recording run
computed.
"""

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch

from cgcompile.errors import CaptureError
from cgcompile.graphs.device import is_recording, recording
from cgcompile.graphs.host_rules import (
    OpRules,
    shown,
    values_on_host,
    write_targets,
)
from cgcompile.graphs.state import RanCode
from cgcompile.torch_compat import raw_memory, torch_ops

aten = torch.ops.aten

_ALIGNMENT = 64  # what vectorised kernels expect

# -------------------------------------------------------------- memory


class _Block:
    """Bytes, and the life of the tensors that use them."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = (ctypes.c_char * (nbytes + _ALIGNMENT))()
        self._start = -ctypes.addressof(self._buffer) % _ALIGNMENT
        self.nbytes = nbytes
        self.address = ctypes.addressof(self._buffer) + self._start
        self.life: raw_memory.StorageLife | None = None
        self.dtype = torch.uint8

    def bytes(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes as a tensor of a storage of its own, which keeps the memory."""
        with torch.inference_mode(False):
            return torch.frombuffer(
                self._buffer, dtype=torch.uint8, count=nbytes, offset=self._start
            )

    @property
    def free(self) -> bool:
        return self.life is None or self.life.ended

    def poison(self) -> None:
        """Fill with NaN for floating numbers, a huge number for integers, True for bools."""
        value = 0x7F
        if self.dtype.is_floating_point or self.dtype.is_complex:
            value = 0xFF
        elif self.dtype is torch.bool:
            value = 1
        ctypes.memset(self.address, value, self.nbytes)


# All pools that exist, as CUDA's allocator knows its private pools.
_pools: "weakref.WeakSet[HostPool]" = weakref.WeakSet()


def _check_of_freed(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return a check whether the memory of a tensor was freed: memory of a pool, with the pool."""
    start = tensor.untyped_storage().data_ptr()
    owner = next((weakref.ref(pool) for pool in list(_pools) if pool.holds(start)), None)
    if owner is not None:
        return lambda: owner() is None
    life = raw_memory.StorageLife(tensor)
    return lambda: life.ended


class HostPool:
    """Blocks for graphs that never run at the same time; free as soon as no tensor holds them."""

    workspaces = 0

    def __init__(self, lasting: Callable[[int], bool] | None = None) -> None:
        _pools.add(self)
        self._lasting = lasting  # whether other memory that lives as long begins at an address
        self._blocks: list[_Block] = []
        self._in_use: set[_Block] = set()  # when the capture began
        self._taken: dict[_Block, bytes | None] = {}  # by the capture, with what was in use

    @property
    def reserved(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    @property
    def live(self) -> int:
        return sum(block.nbytes for block in self._blocks if not block.free)

    def holds(self, address: int) -> bool:
        return any(b.address <= address < b.address + b.nbytes for b in self._blocks)

    def lasts(self, address: int) -> bool:
        """Return whether memory that begins at an address lives as long as the pool."""
        return self.holds(address) or (self._lasting is not None and self._lasting(address))

    def begin(self) -> None:
        self._in_use = {block for block in self._blocks if not block.free}
        self._taken.clear()

    def end(self) -> None:
        """Poison what the capture allocated; restore what it may have read before."""
        for block, data in self._taken.items():
            if data is None:
                block.poison()
            else:
                ctypes.memmove(block.address, data, block.nbytes)
        self._taken.clear()

    def poison(self) -> None:
        for block in self._blocks:
            block.poison()

    def poison_free(self, kept: list[tuple[int, int]]) -> None:
        starts = {start for start, _ in kept}
        for block in self._blocks:
            if block.free and block.address not in starts:
                block.poison()

    def allocate(self, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """Return the smallest free block that is large enough, or a new one, while it lives."""
        wanted = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        fitting = [b for b in self._blocks if b.free and b.nbytes >= wanted]
        block = min(fitting, key=lambda b: b.nbytes, default=None)
        if block is None:
            block = _Block(wanted)
            self._blocks.append(block)
        if block not in self._taken:
            used = block in self._in_use
            self._taken[block] = ctypes.string_at(block.address, block.nbytes) if used else None
        block.dtype = dtype
        block.poison()
        tensor = block.bytes(nbytes)
        block.life = raw_memory.StorageLife(tensor)
        return tensor.untyped_storage()


# -------------------------------------------------------------- recordings


@dataclass
class HostStep:
    """One recorded call; it holds tensors weakly."""

    name: str  # of the op, for messages
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Of each input that the pool does not own: whether it was freed, and its shape.
    outside: list[tuple[Callable[[], bool], str]]
    # For each new storage: the index of an output that has it, and where its bytes go.
    results: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    inside: str = ""  # the op in whose body it is, and the line, for messages

    def run(self) -> None:
        """Call it, and copy new results to where the recording has them."""
        for is_freed, shape in self.outside:
            if is_freed():
                raise CaptureError.freed_input(what=self.name + self.inside, shape=shape)
        output = self.call(*self.args, **self.kwargs)
        if self.results:
            alone = type(output) is torch.Tensor
            leaves = [output] if alone else torch_ops.tree_leaves(output)
            for position, target in self.results:
                target.copy_(raw_memory.storage_bytes(leaves[position].untyped_storage()))


@dataclass
class _Body:
    """What the Python kernel of an op recorded, which compiled code calls at each replay.

    Memory of that code is another at each call: such arguments are copied in and out.
    """

    steps: list[HostStep]
    copied: list[tuple[int, torch.Tensor]]  # (leaf of the arguments, its bytes in the pool)
    result: Any

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the steps on the arguments of this call, and return what the kernel returned."""
        leaves = torch_ops.tree_leaves((args, kwargs))
        pairs = [
            (raw_memory.storage_bytes(leaves[i].untyped_storage()), home) for i, home in self.copied
        ]
        for memory, home in pairs:
            home.copy_(memory)
        for step in self.steps:
            step.run()
        for memory, home in pairs:
            memory.copy_(home)
        return self.returned(leaves)

    def returned(self, leaves: list[Any]) -> Any:
        """Return the result, with the memory of the arguments where it is theirs."""
        owners = {home.data_ptr(): leaves[index] for index, home in self.copied}

        def own(leaf: Any) -> Any:
            address = leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else 0
            return _placed(leaf, owners[address].untyped_storage()) if address in owners else leaf

        return torch_ops.tree_map(own, self.result)


def _placed(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of the same layout in other memory."""
    layout = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *layout)


class _InRegion(torch_ops.DispatchMode):
    """Give the calls of Python kernels in compiled code to a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = torch_ops.python_kernel(func)
        return func(*args, **kwargs) if kernel is None else self._run(func, kernel, args, kwargs)


def _in_autocast(
    state: dict[str, torch.dtype], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with torch_ops.autocast_on(state):
        return call(*args, **kwargs)


def _replay_region(call: Callable[[list[Any]], Any], bodies: list[_Body], *inputs: Any) -> Any:
    """Run compiled code, with the recorded bodies in place of Python kernels."""
    if not bodies:
        return call(list(inputs))
    ahead = iter(bodies)
    with _InRegion(lambda _, __, args, kwargs: next(ahead).run(args, kwargs)):
        return call(list(inputs))


_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted}
_ALLOCATIONS |= {aten.new_empty, aten.new_empty_strided}
# Replace the memory of their first argument, once: what Dynamo emits for ``x.data = y``.
_REPLACE_MEMORY = {"aten::shallow_copy_data_", "aten::set_data", "aten::set_"}


class HostGraph:
    """One recording. See :class:`~cgcompile.graphs.device.DeviceGraph`."""

    def __init__(self) -> None:
        self._steps: list[HostStep] = []
        self._recorder: _Recorder | None = None
        self._recorded = False
        self._pool: HostPool | None = None  # keeps the memory of the steps
        self._default_dtype = torch.get_default_dtype()  # at the capture; steps run under it

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the recorded calls, in order."""
        return tuple(step.name for step in self._steps)

    def begin(self, pool: HostPool, generators: Sequence[torch.Generator] = ()) -> None:
        if is_recording():
            raise CaptureError.nested(what="HostGraph.begin()")
        if self._recorded:
            raise CaptureError.twice(what="HostGraph", advice="Call reset() first.")
        self._recorder = _Recorder(pool, self._steps)
        self._recorder.generators = generators
        self._recorder.start()
        self._pool = pool
        recording.graph = self

    def end(self) -> None:
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        recording.graph = None
        recorder.stop()
        if recorder.refused is not None:  # the program went on; CUDA would not have
            self.reset()
            raise recorder.refused
        self._recorded = True
        self._default_dtype = torch.get_default_dtype()

    def abandon(self) -> None:
        if self._recorder is not None:
            with contextlib.suppress(CaptureError):
                self.end()
        self.reset()

    def reset(self) -> None:
        self._steps.clear()
        self._recorded = False
        self._pool = None

    def replay(self) -> None:
        if not self._recorded:
            raise CaptureError.empty()
        if is_recording():
            raise CaptureError.nested(what="replay()")
        off = torch.autocast("cpu", enabled=False)
        with torch.inference_mode(False), torch.no_grad(), off, torch_ops.without_modes():
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(self._default_dtype)
            try:
                for step in self._steps:
                    step.run()
            finally:
                torch.set_default_dtype(dtype)


class _Recorder(OpRules):
    """Record each op of one capture, and undo what the recording run did outside of the graph."""

    def __init__(self, pool: HostPool, steps: list[HostStep]) -> None:
        super().__init__()
        self._pool, self._steps = pool, steps
        self._made: set[int] = set()  # addresses of storages that this capture allocated
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._profiles = False  # whether the profile function of this thread is ours
        self._paused: RanCode | None = None  # while the recorder's code runs
        self._op_name = ""  # whose body runs
        self._ended = False
        self.refused: CaptureError | None = None  # a capture that met one of these is lost

    def start(self) -> None:
        self._random, self._seed = torch.get_rng_state(), torch.initial_seed()
        self._states = [(generator, generator.get_state()) for generator in self.generators]
        self._pool.begin()
        self.switch_on()
        self._refuse_reads(True)

    def stop(self) -> None:
        self._refuse_reads(False)
        self.switch_off()
        self._ended = True
        if self.refused is None and torch.initial_seed() != self._seed:
            self.refused = CaptureError.seeded(
                op="torch.manual_seed", before=self._seed, after=torch.initial_seed()
            )
        torch.set_rng_state(self._random)
        for generator, state in self._states:
            generator.set_state(state)
        with torch.inference_mode(False), torch.no_grad(), torch_ops.without_modes():
            for memory, bytes_before in self._before.values():
                memory.copy_(bytes_before)
            self._pool.end()
        self._before.clear()

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ended:  # the autograd engine restores the modes that were on when it started
            if torch_ops.inside_backward() or is_recording():
                raise CaptureError.ended_recording(op=str(func))
            return func(*args, **kwargs)
        self._refuse_reads(False)  # of its own code it takes half of the time of a capture
        try:  # not by _refusing: a trace function would be called for it at each op
            return self._recorded(func, args, kwargs)
        finally:
            self._refuse_reads(True)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = torch_ops.compiled_region(func, args)
        if region is not None:
            return self._compiled_region(*region)
        kernel = torch_ops.python_kernel(func)
        if kernel is not None:
            return self._of_op(func, kernel, args, kwargs)
        refused = self.refusal(func, args, kwargs)
        if refused is not None:
            self.refuse(refused)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        replaced = first if _REPLACE_MEMORY.intersection(torch_ops.op_names(func)) else None
        if replaced is not None and replaced.untyped_storage().data_ptr() not in self._made:
            self.refuse(CaptureError.replaces_argument(op=str(func), shape=shown(replaced)))
        return self._op(func, args, kwargs)

    # -------------------------------------------------------------- one call

    def _of_op(
        self, func: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the ops in the body of an op, not the call."""
        outer, self._op_name = self._op_name, torch_ops.op_names(func)[-1]
        try:
            with self:
                return self._refusing(True, kernel, *args, **kwargs)
        finally:
            self._op_name = outer

    def _refusing(self, on: bool, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function; what it reads is refused if ``on``, as in code of the user."""
        self._refuse_reads(on)
        try:
            return call(*args, **kwargs)
        finally:
            self._refuse_reads(not on)

    def _compiled_region(self, call: Callable[[list[Any]], Any], inputs: Any) -> Any:
        tensors = torch_ops.tree_tensors(inputs)
        for tensor in tensors:  # which of them it writes is not known
            self._remember(tensor)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        bodies: list[_Body] = []
        replay = partial(_replay_region, call, bodies)
        step = self._step("compiled_region", replay, tuple(inputs), {})
        with _InRegion(partial(self._refusing, False, self._body, known, bodies)):
            output = self._refusing(True, call, list(inputs))
        return self._finish(step, output, tensors, has_effect=True)

    def _body(
        self,
        known: set[int],
        bodies: list[_Body],
        func: Any,
        kernel: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record the body of an op that compiled code calls; run it on memory that lasts."""
        homes: dict[int, torch.UntypedStorage] = {}
        body, steps = _Body([], [], None), self._steps
        position = -1

        def last(leaf: Any) -> Any:
            nonlocal position
            position += 1
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is None or not storage.nbytes():
                return leaf
            start = storage.data_ptr()
            if start in known or start in self._made:
                return leaf
            if start not in homes:
                homes[start] = self._pool.allocate(storage.nbytes(), leaf.dtype)
                self._made.add(homes[start].data_ptr())
                home = raw_memory.storage_bytes(homes[start])
                home.copy_(raw_memory.storage_bytes(storage))
                body.copied.append((position, raw_memory.weak_tensor(home)))
            return _placed(leaf, homes[start])

        leaves = torch_ops.tree_leaves((args, kwargs))
        args, kwargs = torch_ops.tree_map(last, (args, kwargs))
        self._steps = body.steps
        try:
            body.result = self._of_op(func, kernel, args, kwargs)
        finally:
            self._steps = steps
        for index, home in body.copied:
            raw_memory.storage_bytes(leaves[index].untyped_storage()).copy_(home)
        returned = body.returned(leaves)
        body.result = torch_ops.tree_map(self._weak, body.result)
        bodies.append(body)
        return returned

    def _weak(self, leaf: Any) -> Any:
        """Return a tensor of the pool without a hold on its memory; anything else as it is."""
        is_pooled = (
            isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in self._made
        )
        return raw_memory.weak_tensor(leaf) if is_pooled else leaf

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = getattr(func, "overloadpacket", func)
        written = write_targets(func, args, kwargs)
        for tensor in written:
            self._remember(tensor)
        call = torch_ops.waited_collective(func) or func  # its result is moved at once
        autocast = torch_ops.autocast_state()
        if autocast:
            call = partial(_in_autocast, autocast, call)
        step = self._step(str(func), call, args, kwargs)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in written]
        if not self.are_numbers(torch_ops.tree_tensors((args, kwargs))):
            self.mark(addresses, False)
        output = self._refusing(True, call, *args, **kwargs)
        if addresses != [tensor.untyped_storage().data_ptr() for tensor in written]:
            self.refuse(CaptureError.replaces_argument(op=str(func), shape=shown(written[0])))
        if packet is aten.lift_fresh:  # each replay begins with the data, whatever wrote it
            fill = raw_memory.alias(output).copy_
            self._steps.append(HostStep(str(func), fill, (output.clone(),), {}, []))
            self.mark([output.untyped_storage().data_ptr()], True)
            return output
        if packet in _ALLOCATIONS:
            return self._moved(output, [])[0]
        has_effect = bool(written) or not torch_ops.tree_tensors(output)
        output = self._finish(step, output, torch_ops.tree_tensors((args, kwargs)), has_effect)
        if packet is aten.lift_fresh_copy:  # what AOTAutograd makes of it
            self.mark([output.untyped_storage().data_ptr()], True)
        return output

    def _step(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HostStep:
        """Return the record of a call before it runs; in-place ops may change their arguments."""
        outside: list[tuple[Callable[[], bool], str]] = []

        def held(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            start = leaf.untyped_storage().data_ptr()
            if leaf.numel() and not self._pool.lasts(start):  # else no byte of it is read
                outside.append((_check_of_freed(leaf), shown(leaf)))
            # Ops made of other ops choose kernels by it, without gradients too.
            return raw_memory.weak_tensor(leaf).requires_grad_(leaf.requires_grad)

        weak_args, weak_kwargs = torch_ops.tree_map(held, (args, kwargs))
        inside = f" in {self._op_name}{_running_line()}" if outside and self._op_name else ""
        return HostStep(name, call, weak_args, weak_kwargs, outside, inside=inside)

    def _finish(
        self, step: HostStep, output: Any, inputs: list[torch.Tensor], has_effect: bool
    ) -> Any:
        output, step.results = self._moved(output, inputs)
        if step.results or has_effect:
            self._steps.append(step)
        return output

    def _moved(
        self, output: Any, inputs: list[torch.Tensor]
    ) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
        """Return results with new memory moved into the pool, and where the bytes of each are."""
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        of_numbers = self.are_numbers(inputs)
        homes: dict[int, torch.UntypedStorage] = {}
        results: list[tuple[int, torch.Tensor]] = []
        position = -1

        def move(leaf: Any) -> Any:
            nonlocal position
            position += 1
            if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().nbytes() == 0:
                return leaf
            address = leaf.untyped_storage().data_ptr()
            if address in known:
                return leaf  # memory of an argument
            if address not in homes:
                home = self._pool.allocate(leaf.untyped_storage().nbytes(), leaf.dtype)
                homes[address] = home
                self._made.add(home.data_ptr())
                self.mark([home.data_ptr()], of_numbers)
                target = raw_memory.storage_bytes(home)
                target.copy_(raw_memory.storage_bytes(leaf.untyped_storage()))
                results.append((position, raw_memory.weak_tensor(target)))
            return _placed(leaf, homes[address])

        return torch_ops.tree_map(move, output), results

    # -------------------------------------------------------------- what a capture must not do

    def refuse(self, error: CaptureError) -> None:
        """Raise, and lose the capture."""
        self.refused = error
        raise error

    def _refuse_reads(self, on: bool) -> None:
        """Refuse reads that the dispatcher does not see, unless another profiler is active."""
        if self._ended:
            return
        if on:
            self._profiles = sys.getprofile() is None
        if self._profiles:
            sys.setprofile(self._profile if on else None)
        if not on:
            self._paused = RanCode.pause()
        elif self._paused is not None:
            self._paused.resume()

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or getattr(function, "__name__", "") not in ("tolist", "numpy"):
            return
        tensor = getattr(function, "__self__", None)
        if isinstance(tensor, torch.Tensor) and id(tensor) not in values_on_host():
            self.refuse(CaptureError.refused(op=f"Tensor.{function.__name__}()"))

    def _remember(self, tensor: torch.Tensor) -> None:
        """Keep the bytes of memory that this capture did not make, before it is written."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() and address not in self._made and address not in self._before:
            with torch.inference_mode(False):
                memory = raw_memory.storage_bytes(storage)
                self._before[address] = (memory, memory.clone())


def _running_line() -> str:
    """Return the innermost line that is not torch's or this package's, in parentheses."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "cgcompile"):
            return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


class HostDevice:
    """See :class:`~cgcompile.graphs.device.CaptureDevice`. A CPU has one stream: the program."""

    device = torch.device("cpu")
    tensor_type = "cpu"
    notices_freed, graph_step = True, 1
    executables = "not measured: the host recorder has no driver"

    def new_pool(
        self, stream: None = None, lasting: Callable[[int], bool] | None = None
    ) -> HostPool:
        return HostPool(lasting)

    def new_graph(self) -> HostGraph:
        return HostGraph()

    def on_stream(self, stream: None) -> AbstractContextManager[Any]:
        return nullcontext()

    is_capturing = staticmethod(is_recording)

    def around(self, function: Any = None) -> AbstractContextManager[Any]:
        if function is not None and not torch_ops.holds_compiled_code(function):
            return nullcontext()
        return torch_ops.uncompiled()

    def stream_key(self) -> int:
        return 0

    reserved = graph_bytes = stream_key

    def lacks_memory(self) -> bool:
        return False

    def _nothing(self, stream: None = None, generators: Any = ()) -> None:
        """A CPU has no streams, and nothing to wait for."""

    capture_stream = current_stream = synchronize = give_back = wait_for = recover = _nothing
