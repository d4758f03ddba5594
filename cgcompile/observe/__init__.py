"""Looking at a model, at what was compiled of it, and at what its graphs were worth.

Read in this order: ``parts`` and ``explanation`` (the values), ``explain`` (how they are made),
``report`` (from a split), ``text`` (how they print); ``coverage``;
``targets`` and ``profile``; ``verify`` and ``bisect``, which compare (``comparing``) runs that
leave nothing behind (``restore``). The rule: what is here looks, and changes nothing.
"""

from cgcompile.observe.bisect import Bisection, bisect
from cgcompile.observe.coverage import Coverage, coverage
from cgcompile.observe.explain import explain
from cgcompile.observe.explanation import Explanation
from cgcompile.observe.gather import report
from cgcompile.observe.overview import Overview
from cgcompile.observe.verification import Check, Verification
from cgcompile.observe.verify import verify
