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
    from cgcompile.debug.coverage import Coverage, coverage
    from cgcompile.debug.doctor import Diagnosis, doctor
    from cgcompile.debug.explain import Explanation, explain
    from cgcompile.debug.profile import Profile, profile, timeline
    from cgcompile.debug.report import report
    from cgcompile.debug.verify import Verification, verify
    from cgcompile.graphs.sequence import tracing_ranges

__all__ = [
    "Coverage",
    "Diagnosis",
    "Explanation",
    "Profile",
    "Verification",
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
            "debug.coverage": "Coverage coverage",
            "debug.doctor": "Diagnosis doctor",
            "debug.explain": "Explanation explain",
            "debug.profile": "Profile profile timeline",
            "debug.report": "report",
            "debug.verify": "Verification verify",
            "graphs.sequence": "tracing_ranges",
        },
        moved={
            "debug.bisect": "Bisection",
            "debug.compare": "Difference",
            "debug.findings": "Finding",
            "debug.profile": "Captures",
            "debug.report": "Overview",
            "debug.verify": "Check",
            "graphs.timeline": "CaptureRecord",
            "reasons": "Counters",
        },
    )
