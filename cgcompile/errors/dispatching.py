"""Errors of the dispatcher. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError, listed


class BatchError(CGCompileError, ValueError):
    """A batch that contradicts itself, or a graph that a dispatcher did not plan."""

    @classmethod
    def field(cls, name: str, value: object, expected: str) -> "BatchError":
        return cls(f"dispatch: {name} = {value!r}; expected {expected}.")

    @classmethod
    def not_uniform(
        cls, num_tokens: int, num_reqs: int | None, max_query_len: int | None
    ) -> "BatchError":
        return cls(
            f"dispatch(num_tokens={num_tokens}, num_reqs={num_reqs}, "
            f"max_query_len={max_query_len}, uniform_decode=True): requests of one length need "
            "num_tokens == num_reqs * max_query_len.\n"
            "  Give the numbers before padding, or uniform_decode=False."
        )

    @classmethod
    def which_query_len(cls, num_tokens: int, known: Sequence[int]) -> "BatchError":
        return cls(
            f"dispatch(num_tokens={num_tokens}, uniform_decode=True): there are graphs for several "
            f"query lengths ({listed(map(str, known))}), and nothing says which one this is.\n"
            "  Give num_reqs or max_query_len."
        )

    @classmethod
    def axes(cls, extra: object, names: Sequence[str]) -> "BatchError":
        return cls(
            f"dispatch: extra = {extra!r}; expected a tuple with one hashable value per axis, each "
            f"comparable with the listed ones: {listed(names)}."
        )

    @classmethod
    def not_planned(cls, mode: str, descriptor: str) -> "BatchError":
        return cls(
            f"no graph is planned for mode {mode} and {descriptor}.\n"
            "  Take modes and descriptors from plan()."
        )

    @classmethod
    def lengths_differ(cls, lengths: int, flags: int) -> "BatchError":
        return cls(
            f"is_uniform_decode: {lengths} query lengths and {flags} flags of prefill; expected "
            "one of each per request."
        )
