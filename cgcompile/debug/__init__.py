"""Inspect a model, what was compiled from it, and the use of its graphs.

``explain`` before a run, ``coverage``, ``report`` and ``profile`` after one, ``doctor`` for what
graphs cannot hold; ``verify`` compares (``compare``, ``locate``, ``search``) runs that leave
nothing behind (``restore``). All results print, and are JSON (``output``). The rule: what is here
observes, and changes nothing.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.debug.bisect import Bisection, bisect
    from cgcompile.debug.compare import Difference
    from cgcompile.debug.coverage import Coverage, coverage
    from cgcompile.debug.doctor import Diagnosis, Finding, doctor
    from cgcompile.debug.explain import Explanation, explain
    from cgcompile.debug.profile import Captures, Profile, profile, timeline
    from cgcompile.debug.report import Overview, report
    from cgcompile.debug.verify import Check, Verification, verify
    from cgcompile.graphs.profiling import tracing_ranges
    from cgcompile.graphs.timeline import CaptureRecord
    from cgcompile.reasons import Counters

__all__ = [
    "Bisection",
    "CaptureRecord",
    "Captures",
    "Check",
    "Counters",
    "Coverage",
    "Diagnosis",
    "Difference",
    "Explanation",
    "Finding",
    "Overview",
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
            "debug.bisect": "Bisection bisect",
            "debug.compare": "Difference",
            "debug.coverage": "Coverage coverage",
            "debug.doctor": "Diagnosis Finding doctor",
            "debug.explain": "Explanation explain",
            "debug.profile": "Captures Profile profile timeline",
            "debug.report": "Overview report",
            "debug.verify": "Check Verification verify",
            "graphs.profiling": "tracing_ranges",
            "graphs.timeline": "CaptureRecord",
            "reasons": "Counters",
        },
    )
