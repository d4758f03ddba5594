"""Errors of batch sizes and their dispatch. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError

_SHOWN = 8  # a list of sizes may be long


def _some(sizes: Sequence[int]) -> str:
    rest = len(sizes) - _SHOWN
    return ", ".join(map(str, sizes[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


class SizesError(CGCompileError, ValueError):
    """Batch sizes to capture that cannot be, or that nothing says how to choose."""

    @classmethod
    def number(cls, name: str, found: object, least: int) -> "SizesError":
        return cls(f"{name} = {found!r}; expected a whole number of at least {least}.")

    @classmethod
    def not_a_size(cls, found: object) -> "SizesError":
        return cls(
            f"capture sizes: {found!r} is none; expected whole numbers of at least 1.\n"
            "  A step without rows needs no graph."
        )

    @classmethod
    def empty(cls) -> "SizesError":
        return cls(
            "no capture sizes were given; expected at least one.\n"
            "  For steps without graphs take CUDAGraphMode.NONE."
        )

    @classmethod
    def above(cls, sizes: Sequence[int], maximum: int) -> "SizesError":
        return cls(
            f"capture sizes {_some(sizes)}: above the maximum of {maximum}, so that no batch needs "
            "them and no buffer holds them.\n  Leave them out, or raise the maximum."
        )

    @classmethod
    def no_multiple(cls, multiple: int, maximum: int) -> "SizesError":
        return cls(
            f"no capture size is possible: the maximum is {maximum}, and sizes must be multiples "
            f"of {multiple}.\n"
            "  Raise the maximum, or take a smaller query length or parallel size."
        )

    @classmethod
    def bad_entry(cls, batch: object, steps: object) -> "SizesError":
        return cls(
            f"histogram: {{{batch!r}: {steps!r}}}; expected batch size: number of steps, whole "
            "numbers of at least 1 and 0.\n  Leave idle steps out: they run nothing."
        )

    @classmethod
    def no_steps(cls) -> "SizesError":
        return cls(
            "fit_sizes(): the histogram holds no steps, so there is nothing to fit.\n"
            "  Count the batch sizes of real steps, or take capture_sizes()."
        )

    @classmethod
    def no_budget(cls) -> "SizesError":
        return cls(
            "fit_sizes(): no budget was given; without one every observed batch size would get a "
            "graph.\n  Give count=, or nbytes= and bytes_of=, or all three."
        )

    @classmethod
    def bytes_unknown(cls, nbytes: int) -> "SizesError":
        return cls(
            f"fit_sizes(nbytes={nbytes}): nothing says what a graph takes.\n"
            "  Give bytes_of=, a function from a size to the bytes of its graph."
        )

    @classmethod
    def bad_measure(cls, name: str, size: int, found: object, expected: str) -> "SizesError":
        return cls(f"fit_sizes(): {name}({size}) returned {found!r}; expected {expected}.")

    @classmethod
    def too_few_bytes(cls, nbytes: int, size: int, needed: int) -> "SizesError":
        return cls(
            f"fit_sizes(nbytes={nbytes}): the graph of size {size}, which alone would cover all "
            f"batches, takes {needed} bytes.\n"
            "  Raise nbytes, lower maximum, or give cost_without_graph=, so that large batches may "
            "run without a graph."
        )

    @classmethod
    def not_covered(cls, batch: int, largest: int) -> "SizesError":
        return cls(
            f"fit_sizes(): the largest candidate is {largest}, and batches of {batch} were "
            f"observed.\n  Add a candidate, or give maximum={largest}: larger batches then run "
            "without a graph."
        )
