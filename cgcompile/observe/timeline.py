"""The captures of a model in the order of time: :func:`timeline`."""

from typing import Any

from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.observe.targets import recorders_of


def timeline(target: Any) -> tuple[CaptureRecord, ...]:
    """What was captured, or refused, when, how long it took and how many bytes.

    Args:
        target: a compiled model, a :class:`cgcompile.Backend`, one of its graphs, a wrapper, a
            ``CudaGraphManager`` or an ``EncoderCudaGraphManager``.

    Returns:
        A record for each capture, in the order they began; of what lives, and of each the last
        few thousand. Releasing graphs removes none. ``[each.to_dict() for each in found]`` is JSON.

    Raises:
        ConfigError: the target captures nothing.
    """
    found = [
        record for each in recorders_of(target, "timeline") for record in each.timeline.records
    ]
    return tuple(sorted(found, key=lambda record: record.start))
