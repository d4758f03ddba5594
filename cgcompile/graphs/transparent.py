"""The base of wrappers that show the attributes of what they wrap."""

from typing import Any

from cgcompile.errors import missing_attribute


class Transparent:
    """Show the attributes of ``runnable``, as ``model.layers``, beside its own."""

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because a copy has no runnable at first. Special methods, such as those
        # for copies and pickles, are not those of the runnable.
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
