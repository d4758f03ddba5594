"""The parts of an :class:`~cgcompile.observe.explanation.Explanation`: plain frozen values.

The rule for all of them: fields are text, numbers, and tuples of such, so that :func:`plain` of one
is nothing but its fields by name. Whoever changes a field raises ``VERSION`` of what holds it.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from cgcompile.config import CompilationConfig


class SourceLine(NamedTuple):
    """A line of the user's.

    Attributes:
        where: ``model.py:41 in forward``.
        code: the line itself; empty where the file is not there.
    """

    where: str
    code: str

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


class Cause(NamedTuple):
    """Why something is as it is.

    Attributes:
        reason: the name of a :class:`cgcompile.Reason`, such as ``splitting_op``.
        detail: what it is about, in words.
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Bytes:
    """A number of bytes.

    Attributes:
        expression: in the symbols ``s0``, ``s1``, ..., such as ``256*s0``.
        traced: with the sizes of the call that was looked at; None where only data tells.
        at: (size, bytes) for each asked size of the batch dimension; bytes are None where the
            model's guards exclude the size.
    """

    expression: str
    traced: int | None
    at: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class ValueReport:
    """Something that goes into a piece or comes out of it.

    Attributes:
        name: unique in the explanation; the same name is the same value.
        shape: sizes, as expressions of the symbols; None if it is no tensor.
        dtype: such as ``bf16`` or ``f32``; None if it is no tensor.
        device: where it is; None if it is no tensor.
        bytes: of its elements; None if it is no tensor.
        storage: of the memory that a view of it keeps alive; None if it is no tensor.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: at a fixed address: a parameter, a buffer or an attribute of a module.
        written: some piece may write its memory.
    """

    name: str
    shape: tuple[str, ...] | None
    dtype: str | None
    device: str | None
    bytes: Bytes | None
    storage: Bytes | None
    source: str | None
    static: bool
    written: bool


@dataclass(frozen=True)
class PieceReport:
    """One piece, in the order of execution.

    Attributes:
        index: its position.
        name: ``piece_3``, as in logs and messages.
        captured: whether CUDA graphs may hold it; else it runs eager.
        why: why it runs eager; empty if it is captured.
        support: name of the :class:`cgcompile.AttentionCGSupport`: how far it goes into a FULL
            graph.
        num_ops: nodes that compute.
        source: the user's lines: of the boundary, or of the first node.
        inputs: what it takes.
        outputs: what it returns.
        bytes_in: of the memory behind its inputs that are not static.
        bytes_out: of the memory behind its outputs.
        same_as: index of the first piece of equal structure; its own if it is the first.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled; None if it is.
    """

    index: int
    name: str
    captured: bool
    why: tuple[Cause, ...]
    support: str
    num_ops: int
    source: tuple[SourceLine, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    bytes_in: Bytes
    bytes_out: Bytes
    same_as: int
    compiled: bool
    uncompiled: str | None


@dataclass(frozen=True)
class SymbolReport:
    """A size that varies.

    Attributes:
        name: ``s0``.
        source: the dimension that it stands for, such as ``x.size()[0]``.
        traced: its number in the call that was looked at; None if nothing was assumed of it.
        least: the least number that it may stand for.
        most: the largest; None if there is no bound.
        guards: what the model's code assumed of it.
    """

    name: str
    source: str
    traced: int | None
    least: int
    most: int | None
    guards: tuple[str, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over all pieces.

    Attributes:
        pieces: how many there are.
        captured: of them.
        eager: of them.
        distinct: of different structure.
        compiled: distinct pieces that the compiler gets.
        ops: nodes that compute.
        crossing: bytes of the memory behind all that pieces hand on, each once.
        static: bytes of parameters, buffers and attributes that pieces read, each once.
    """

    pieces: int
    captured: int
    eager: int
    distinct: int
    compiled: int
    ops: int
    crossing: Bytes
    static: Bytes


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ends a graph.

    What comes behind the first break is not known: Dynamo goes on only after running what is
    before it.

    Attributes:
        door: ``"cgcompile.compile"``: the call does not become one graph at all;
            ``"torch.compile"``: it breaks there under torch's default settings alone.
        what: Dynamo's reason in one line.
        hints: what Dynamo says to it.
        source: the user's line; None if torch has none.
        fix: what to do.
    """

    door: str
    what: str
    hints: tuple[str, ...]
    source: SourceLine | None
    fix: str


@dataclass(frozen=True)
class ModeReport:
    """Which CUDA graphs would serve steps, as far as boundaries allow.

    Attributes:
        asked: the ``cudagraph_mode`` of the settings.
        result: what :class:`cgcompile.CudagraphDispatcher` makes of it for such boundaries.
        without_context: the runtime mode of a call that nobody set a forward context around.
        support: how far the least able boundary goes into a FULL graph; None if nothing was traced.
        lost: why ``result`` is less than was asked for; empty if it is not.
    """

    asked: str
    result: str
    without_context: str | None
    support: str | None
    lost: tuple[Cause, ...]


class SettingReport(NamedTuple):
    """One setting.

    Attributes:
        name: of it.
        value: what holds: text, a number, a bool, None or a list of such.
        origin: ``default``, ``environment``, ``options`` or ``mode`` of ``torch.compile``, or
            ``argument``.
    """

    name: str
    value: Any
    origin: str


def settings_of(config: CompilationConfig) -> tuple[SettingReport, ...]:
    """All settings as plain values, with where each comes from."""
    return tuple(
        SettingReport(name, _plain_setting(getattr(config, name)), origin)
        for name, origin in config.origins.items()
    )


def _plain_setting(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_setting, value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(getattr(value, "name", None) or getattr(value, "__qualname__", None) or value)


def plain(value: Any) -> Any:
    """A value of frozen dataclasses and tuples as dicts and lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return value
