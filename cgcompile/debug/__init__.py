"""Looking at a model, at what was compiled of it, and at what its graphs were worth.

Read in this order: ``parts`` and ``explanation`` (the values), ``explain`` (how they are made),
``report`` (from a split), ``text`` (how they print); ``coverage``;
``targets`` and ``profile``; ``verify`` and ``bisect``, which compare (``comparing``) runs that
leave nothing behind (``restore``). The rule: what is here looks, and changes nothing.
"""

from cgcompile.debug.bisect import Bisection, bisect
from cgcompile.debug.coverage import Coverage, coverage
from cgcompile.debug.explain import Explanation, explain
from cgcompile.debug.report import Overview, report
from cgcompile.debug.verify import Check, Verification, verify
