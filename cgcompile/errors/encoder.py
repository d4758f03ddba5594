"""Errors of encoder graphs. See ``cgcompile/errors/__init__.py``."""

from collections.abc import Sequence

from cgcompile.errors.root import CGCompileError


class EncoderBudgetError(CGCompileError, ValueError):
    """Token budgets, or numbers of items or frames, that cannot be."""

    @classmethod
    def number(cls, name: str, found: object, least: int) -> "EncoderBudgetError":
        return cls(f"{name} = {found!r}; expected a whole number of at least {least}.")

    @classmethod
    def not_a_budget(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"encoder budgets: {found!r} is none; expected whole numbers of at least 1.\n"
            "  A budget is the number of output tokens of one graph."
        )

    @classmethod
    def empty(cls) -> "EncoderBudgetError":
        return cls(
            "encoder budgets: the list is empty; expected at least one.\n"
            "  Give budgets=None to have them generated from budget_range."
        )

    @classmethod
    def range(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"budget_range = {found!r}; expected the least and the most output tokens of a graph.\n"
            "  Both must be positive whole numbers."
        )

    @classmethod
    def range_order(cls, least: int, most: int) -> "EncoderBudgetError":
        return cls(
            f"budget_range = ({least}, {most}): the least, {least}, is above the most, {most}.\n"
            "  Swap them, or raise the most: it is the largest budget that is captured."
        )

    @classmethod
    def items_above_range(cls, max_items: int, most: int) -> "EncoderBudgetError":
        return cls(
            f"max_items = {max_items} is above {most}, the largest budget of budget_range.\n"
            "  Each item needs at least one token of every budget. Lower max_items, or raise the "
            "most of budget_range."
        )

    @classmethod
    def items_above_budget(cls, max_items: int, budget: int) -> "EncoderBudgetError":
        return cls(
            f"max_items = {max_items}; it must be <= the smallest token budget, {budget}.\n"
            "  Each item needs at least one token of every budget: a graph whose share per item is "
            "empty cannot be captured. Lower max_items, or leave the small budgets out."
        )

    @classmethod
    def ratio(cls, found: object) -> "EncoderBudgetError":
        return cls(
            f"ratio = {found!r}; expected a finite number above 1.\n"
            "  It is how much larger each budget is than the one before."
        )

    @classmethod
    def no_sizes(cls) -> "EncoderBudgetError":
        return cls(
            "fitted_budgets(): nothing was observed, so there is nothing to fit.\n"
            "  Count the output tokens of real groups of items, or take generated_budgets()."
        )


class EncoderPackError(CGCompileError, ValueError):
    """Items that cannot be packed, or limits and costs that cannot be."""

    @classmethod
    def need(cls, item: int, tokens: object, frames: object) -> "EncoderPackError":
        return cls(
            f"item {item}: tokens={tokens!r}, frames={frames!r}; expected whole numbers of at "
            "least 0.\n  An item without part in a path has 0 tokens there."
        )

    @classmethod
    def paths(cls, item: int, found: int, paths: int) -> "EncoderPackError":
        return cls(
            f"item {item}: {found} numbers of tokens; the capacity has {paths} paths.\n"
            "  Give one number per path, in the order of the paths."
        )

    @classmethod
    def capacity(
        cls, budgets: Sequence[Sequence[int]], max_items: int, max_frames: int | None
    ) -> "EncoderPackError":
        return cls(
            f"Capacity(budgets={budgets!r}, max_items={max_items!r}, max_frames={max_frames!r}); "
            "expected the budgets of one path or more, each ascending from at least 1, at least "
            "one item, and frames of at least 0 or None."
        )

    @classmethod
    def cost(cls, name: str, found: object) -> "EncoderPackError":
        return cls(
            f"Costs: {name} = {found!r}; expected a finite number of at least 0, in tokens.\n"
            "  Divide measured times by the time of one token more in a graph."
        )
