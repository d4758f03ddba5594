"""Errors of tracing, and of graphs that are kept. See ``cgcompile/errors/__init__.py``."""

from cgcompile.errors.root import CGCompileError


class TraceError(CGCompileError, RuntimeError):
    """A call that cannot become one graph."""

    @classmethod
    def refused(cls, name: str, why: str) -> "TraceError":
        return cls(
            f"{name} does not become one graph: {why}\n"
            "  Change that line, put it into an op of your own, or take torch.compile(model, "
            "backend='cgcompile'), which makes several graphs of it, or splitting='breakable', "
            "which needs no trace."
        )

    @classmethod
    def sizes_differ(cls, name: str, one: str, other: str) -> "TraceError":
        return cls(
            f"dynamic_dims: both are called {name!r}, but {one} and {other}.\n"
            "  Dimensions of one name have one size; give them two names, or none."
        )

    @classmethod
    def no_such_dimension(cls, path: str, dim: int, shape: str) -> "TraceError":
        return cls(
            f"dynamic_dims: {path} has no dimension {dim}; its shape is {shape}.\n"
            "  Name a dimension that it has in every call."
        )

    @classmethod
    def fixed(cls, name: str, dim: str) -> "TraceError":
        return cls(
            f"{name}: {dim}, and the model fixes it to that, though it was to vary "
            "(dynamic_dims).\n  Look for a comparison with a constant, or int() of the size; or "
            "leave the dimension out."
        )

    @classmethod
    def writes_globals(cls, name: str, names: str) -> "TraceError":
        return cls(
            f"{name} assigns to global names: {names}; a compiled call would not.\n"
            "  Keep that state in an object, or take torch.compile(model, backend='cgcompile')."
        )


class ArgumentsError(CGCompileError, TypeError):
    """Arguments that a model does not take."""

    @classmethod
    def refused(cls, name: str, signature: str, why: str) -> "ArgumentsError":
        return cls(
            f"{name} takes {signature}, and cannot be called with these inputs: {why}.\n"
            "  Give the inputs of one call of the model, as it takes them."
        )


class RecompileError(CGCompileError, RuntimeError):
    """A call that no trace serves, where nothing may be traced any more or guards were dropped."""

    @classmethod
    def closed(cls, name: str, why: str) -> "RecompileError":
        return cls(
            f"{name} is frozen, and this call would be traced again: {why}.\n"
            "  Make such a call before freeze(), or mark what varies with dynamic_dims."
        )

    @classmethod
    def dropped_guard(cls, name: str, guard: str) -> "RecompileError":
        return cls(
            f"{name}: a guard that was dropped does not hold, so the result would be wrong: "
            f"{guard}\n  Keep guards (guards='keep'), or do not change this between calls."
        )
