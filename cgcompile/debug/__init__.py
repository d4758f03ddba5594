"""Inspect a model, what was compiled from it, and the use of its graphs.

``explain`` before a run, ``coverage``, ``report`` and ``profile`` after one, ``doctor`` for what
graphs cannot hold; ``verify`` compares (``compare``, ``locate``, ``search``) runs that leave
nothing behind (``restore``). All results print, and are JSON (``output``). The rule: what is here
observes, and changes nothing.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.debug.bisect import bisect
    from cgcompile.debug.coverage import coverage
    from cgcompile.debug.doctor import Diagnosis, doctor
    from cgcompile.debug.explain import explain
    from cgcompile.debug.profile import profile, timeline
    from cgcompile.debug.report import report
    from cgcompile.debug.verify import verify
    from cgcompile.graphs.sequence import tracing_ranges

__all__ = [
    "Diagnosis",
    "bisect",
    "coverage",
    "doctor",
    "explain",
    "profile",
    "report",
    "timeline",
    "tracing_ranges",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "debug.bisect": "bisect",
            "debug.coverage": "coverage",
            "debug.doctor": "Diagnosis doctor",
            "debug.explain": "explain",
            "debug.profile": "profile timeline",
            "debug.report": "report",
            "debug.verify": "verify",
            "graphs.sequence": "tracing_ranges",
        },
        moved={
            "debug.bisect": "Bisection",
            "debug.compare": "Difference",
            "debug.coverage": "Coverage",
            "debug.explain": "Explanation",
            "debug.findings": "Finding",
            "debug.profile": "Captures Profile",
            "debug.report": "Overview",
            "debug.verify": "Check Verification",
            "graphs.timeline": "CaptureRecord",
            "reasons": "Counters",
        },
    )
