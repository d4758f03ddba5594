"""Attributes of a wrapper are those of what it wraps: :class:`Transparent`.

Code that looks into a model (``model.layers``, ``model.config``) must not care that it is wrapped.
"""

from typing import Any

from cgcompile.errors import missing_attribute


class Transparent:
    """Has ``runnable``, and shows its attributes beside its own."""

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because a copy has no runnable for a moment. How to copy and pickle a
        # module is its own affair.
        if "runnable" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            kind = type(self.__dict__.get("runnable")).__name__
            raise AttributeError(missing_attribute(type(self).__name__, kind, name))
        runnable = self.__dict__["runnable"]
        try:
            return getattr(runnable, name)
        except AttributeError:
            kind = type(runnable).__name__
            text = missing_attribute(type(self).__name__, kind, name)
            raise AttributeError(text) from None
