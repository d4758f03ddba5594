"""What a wrapper keeps of a capture: :class:`CUDAGraphEntry`; and how it captures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError, GuardError
from cgcompile.forward_context import BatchDescriptor
from cgcompile.graphs.device import DeviceGraph
from cgcompile.graphs.fields import FieldsGuard
from cgcompile.graphs.guards import ArgumentGuard, WeightsGuard
from cgcompile.graphs.lent import LentTree, Passed, can_be_lent
from cgcompile.graphs.modules import modules_of
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import flatten, is_record, rebuilt
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.settings import require_fields


@dataclass(frozen=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        debug_log_enable: log each capture (level INFO; DEBUG where False).
        gc_disable: do not collect garbage before a capture. Collecting costs 30 ms and more, and
            gives the memory of dead tensors back; whoever captures many graphs does it once.
            Automatic collection is off inside of every capture, whatever is set here.
        weak_ref_output: let the outputs of a capture go when the caller drops them, so that later
            captures of the pool use their memory. False keeps the memory of each descriptor's
            outputs for itself, so that they outlive the replays of other descriptors.
        debug_breaks: find tensors that an eager break makes and leaves for captured ops to read,
            instead of returning them. Slow; for breakable wrappers.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True
    debug_breaks: bool = False

    def __post_init__(self) -> None:
        require_fields(self)


class Whole:
    """A step of a manager around its model, as a callable.

    Args:
        model: what the step runs; returned by ``unwrap``, for what looks at its fields.
        step: runs it.
    """

    compares_weights = True  # the manager does

    def __init__(self, model: Any, step: Callable[..., Any]) -> None:
        self._model = model
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

    def unwrap(self) -> Any:
        """Return the model."""
        return self._model


@dataclass
class Tally:
    """How often something happened.

    Attributes:
        replays: of a graph, the capturing call not counted.
    """

    replays: int = 0


@dataclass(frozen=True, eq=False)
class CUDAGraphEntry:
    """What one descriptor captured.

    Attributes:
        batch_descriptor: the key.
        sequence: what was recorded; ``sequence.replay()`` runs it.
        output: where a replay leaves its results: tensors in pool memory, valid until another graph
            of the pool runs; and memory from outside of the pool, held here. Not to be changed.
        guard: what the arguments must be; None where others see to that.
        weights: what the parameters and buffers must be; None likewise.
        needs_grad: whether gradients would be due if grad mode were on.
        passed: what of the result the step was given; None where nobody asks for :meth:`result`.
        fields: what the fields of objects among the arguments must be; None without such objects.
        tally: counts its replays.
    """

    batch_descriptor: BatchDescriptor
    sequence: GraphSequence
    output: Any
    guard: ArgumentGuard | None
    weights: WeightsGuard | None
    needs_grad: bool
    passed: Passed | None = None
    fields: FieldsGuard | None = None
    tally: Tally = field(default_factory=Tally)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> None:
        """Compare arguments and weights with those of the capture.

        Raises:
            AddressChangedError: a tensor lies elsewhere.
            HostValueChangedError: another value, layout or structure.
        """
        if self.guard is not None:
            self.guard.check(args, kwargs, what, self.batch_descriptor)
        if self.fields is not None:
            self.fields.check(what, self.batch_descriptor)
        if self.weights is not None:
            self.weights.check(what, self.batch_descriptor)

    @cached_property
    def _lent(self) -> LentTree:
        return LentTree(self.output, self.passed)

    def result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a replay returns: :attr:`output`, in objects that a caller may change.

        An argument that the step returned is that of this call, and a tensor of the module is that
        tensor itself.

        Raises:
            AddressChangedError: a caller let the memory of an earlier result grow.
        """
        return self._lent.get(args, kwargs)

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether :meth:`check` raises nothing."""
        try:
            self.check(args, kwargs, "")
        except GuardError:
            return False
        return True

    @property
    def graph(self) -> DeviceGraph:
        """The recording of a step that is one graph."""
        (segment,) = self.sequence.segments
        assert isinstance(segment, GraphSegment)
        return segment.graph


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture that has just been made.

    Attributes:
        pool: whose graphs it has.
        entry: what later calls replay.
        result: what the captured call returned; tensors that hold nothing before :meth:`run`.
        starts: where the memory of each leaf of the result begins; 0 for what has none.
        executed: whether it has been executed on the way.
        refused: why it must not be replayed; None if it may be.
    """

    pool: GraphPool
    entry: CUDAGraphEntry
    result: Any
    starts: list[int]
    executed: bool
    refused: CaptureError | None = None

    def run(self) -> Any:
        """Execute what was captured, on the current stream, if that is still to be done.

        Returns:
            The result, computed: tensors that keep their memory while they live.
        """
        if not self.executed:
            self.pool.follow_stream()
            self.entry.sequence.replay()
        return self.result


class KeptOutput(NamedTuple):
    """What an entry keeps of the result of a capture.

    Attributes:
        output: the result; weakly what the pool holds, if so asked. No plain tensor is one that
            the caller gets, who may change it.
        starts: where the memory of each leaf begins; 0 for what has none.
    """

    output: Any
    starts: list[int]

    @classmethod
    def of(cls, result: Any, pool: GraphPool, weakly: bool) -> "KeptOutput":
        starts: list[int] = []
        known: dict[tuple[int, int], torch.UntypedStorage | None] = {}  # by address and bytes

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if is_record(leaf):
                    return rebuilt(leaf, [kept(each) for each in flatten(leaf)[0]])
                starts.append(0)
                return leaf
            storage = leaf.untyped_storage()
            nbytes = storage.nbytes()
            start = storage.data_ptr() if nbytes else 0
            starts.append(start)
            place = (start, nbytes)
            if place not in known:  # results that share memory are kept as such
                if not pool.holds(start):
                    known[place] = None
                elif weakly:
                    known[place] = compat.weak_storage(start, nbytes, leaf.device)
                else:
                    known[place] = storage
            own = known[place]
            if own is not None:
                return compat.laid_over(own, leaf)
            return compat.alias(leaf) if can_be_lent(leaf) else leaf

        with compat.outside_inference_mode(), compat.below_autograd():  # once for all
            return cls(compat.tree_map(kept, result), starts)


def devices_of(runnable: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.device]:
    """Where the tensors of a call and of a module are; the CPU only if all are there."""
    found = compat.tree_tensors((args, kwargs))
    if isinstance(runnable, torch.nn.Module):
        found += _weights(runnable)
    devices = dict.fromkeys(tensor.device for tensor in found)
    return [each for each in devices if each.type != "cpu"] or [torch.device("cpu")]


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, then all buffers, at a third of the cost of torch's own walk."""
    modules = _modules(module)
    tables = [each._parameters for each in modules] + [each._buffers for each in modules]
    return [weight for table in tables for weight in table.values() if weight is not None]


def _modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and all in it, each once, at a tenth of the cost of torch's own walk."""
    found, seen = [module], {module}
    for each in found:  # grows meanwhile
        for inner in each._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def gradients_due(needed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result must be differentiable, backward or forward."""
    if not torch.is_grad_enabled():
        return compat.has_tangent((args, kwargs))
    needed = needed or any(leaf.requires_grad for leaf in compat.tree_tensors((args, kwargs)))
    return needed or compat.has_tangent((args, kwargs))


def holds_parameters_with_grad(runnable: Any) -> bool:
    """Whether a parameter of a module, or of those that something else holds, requires grad."""
    unwrap = getattr(runnable, "unwrap", None)
    roots = modules_of(unwrap() if callable(unwrap) else runnable)
    tables = [each._parameters for root in roots for each in _modules(root)]
    return any([w.requires_grad for table in tables for w in table.values() if w is not None])
