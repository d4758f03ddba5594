"""Deprecated: ``verify(model, x, bisect=True)`` replaces :func:`bisect`."""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from cgcompile.debug.compare import Difference
from cgcompile.debug.output import Result
from cgcompile.debug.verify import verify
from cgcompile.errors import DispatchError


@dataclass(frozen=True, repr=False)
class Bisection(Result):
    """The result of :func:`cgcompile.debug.bisect`, which is deprecated; ``print`` it.

    Attributes:
        subject: the name of the model.
        stage: since when the result is wrong: ``tracing``, ``pass``, ``compilation``, ``replay``
            or ``padding``; empty if it is right.
        pieces: the smallest set of pieces that are wrong together: one in the usual case, two where
            one overwrites a result of the other; empty before there are pieces.
        culprit: the name of the pass, where it is one.
        finding: the first value that differs, with op and line; None if no value does.
        steps: what was tried, in order, with its outcome.
        replays: how many replays took part.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> verification = cgcompile.verify(model, torch.randn(4, 8), bisect=True)
        >>> verification.differences  # no result is wrong
        ()
    """

    computed: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    stage: str = ""
    pieces: tuple[str, ...] = ()
    culprit: str = ""
    finding: Difference | None = None
    steps: tuple[str, ...] = ()
    replays: int = 0

    @property
    def ok(self) -> bool:
        """Whether a step was replayed and all results are equal."""
        return not self.stage and bool(self.replays)

    def __str__(self) -> str:
        rows = [
            f"{self.subject}: " + (f"wrong by {self.stage}" if self.stage else "nothing differs")
        ]
        rows += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        if self.pieces:
            rows.append(f"pieces {', '.join(self.pieces)}")
        return "\n".join(rows + ([] if self.finding is None else [str(self.finding)]))


def bisect(model: Any, *args: Any, **kwargs: Any) -> Bisection:
    """Find the piece, and the op, that make the result of a model wrong.

    Deprecated: :func:`cgcompile.verify` does it with ``bisect=True``.

    Args:
        model: as of ``verify``, without managers.
        *args: of one call.
        **kwargs: of the call, and the keyword arguments of ``verify``.

    Raises:
        DispatchError: nothing was replayed.
        ConfigError: settings for a model that has its own, or no model.
        ArgumentsError: the model does not take these arguments.
        BaseException: what the model raised.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> verification = cgcompile.verify(model, torch.randn(4, 8), bisect=True)
        >>> verification.checks[0].steps[0]
        'inputs 0, all replayed: right'
    """
    instead = "cgcompile.debug.bisect is deprecated: call cgcompile.verify(..., bisect=True)"
    warnings.warn(instead, FutureWarning, stacklevel=2)
    verification = verify(model, *args, bisect=True, **kwargs)
    check = verification.checks[0]
    if not check.replays:
        raise DispatchError.nothing_verified(function="bisect", why=check.missing)
    difference = check.findings[0] if check.findings else Difference()
    return Bisection(
        verification.subject,
        difference.stage,
        difference.pieces,
        difference.culprit,
        difference if check.findings else None,
        check.steps,
        check.replays,
    )
