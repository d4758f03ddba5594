"""Looking at a model, at what was compiled of it, and at what its graphs are worth.

``explain`` before a run, ``coverage``, ``report`` and ``profile`` after one, ``doctor`` for what
graphs cannot hold; ``verify`` and ``bisect`` compare (``compare``, ``locate``) runs that leave
nothing behind (``restore``). All results print, and are JSON (``output``). The rule: what is here
observes, and changes nothing.
"""

from cgcompile.debug.bisect import Bisection, bisect
from cgcompile.debug.coverage import Coverage, coverage
from cgcompile.debug.explain import Explanation, explain
from cgcompile.debug.report import Overview, report
from cgcompile.debug.verify import Check, Verification, verify
