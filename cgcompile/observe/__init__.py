"""What can be seen of a model: why it is split as it is, whether its graphs are right."""

from cgcompile.observe.bisect import Bisection, bisect
from cgcompile.observe.findings import Check, Finding, Verification
from cgcompile.observe.verify import verify
