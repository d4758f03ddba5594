"""How large graphs are, from what a user gives and what a model says: :func:`resolved_limits`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cgcompile.encoder.budgets import Budgets, generated_budgets, resolve_budgets, resolve_frames
from cgcompile.encoder.defs import EncoderCudaGraphConfig
from cgcompile.errors import ConfigError, EncoderError
from cgcompile.settings import whole

Budgeted = Sequence[int] | Mapping[str, Sequence[int]]
Range = tuple[int, int]


class Limits(NamedTuple):
    """What all graphs of a manager hold.

    Attributes:
        budgets: by path, output tokens, ascending.
        max_items: of one replay; at most the least budget.
        max_frames: of one replay; 0, if graphs are not for videos: one for each item.
    """

    budgets: Mapping[str, tuple[int, ...]]
    max_items: int
    max_frames: int


def resolved_limits(
    config: EncoderCudaGraphConfig,
    token_budgets: Budgeted | None,
    max_items: int | None,
    max_frames: int | None,
    budget_range: Range | None,
) -> Limits:
    """Budgets of each path, and the items and frames of all.

    Args:
        config: of the encoder.
        token_budgets: what a user gives, for all paths or by path; None: inferred.
        max_items: what a user gives.
        max_frames: what a user gives.
        budget_range: (least, most) output tokens of the model, from which budgets and items are
            inferred; None where nothing is, or with ``token_budgets`` where the model has none: the
            items are inferred from the least and the most of these then.

    Raises:
        EncoderError: numbers that cannot be.
        ConfigError: budgets by path, for other paths than the model has.
    """
    if token_budgets is None:
        assert budget_range is not None
        budgets, items = _inferred(config, max_items, budget_range)
    else:
        budgets, items = _given(_by_path(config, token_budgets), max_items, budget_range)
    frames = resolve_frames(items, config.most_frames_of_an_item, max_frames)
    return Limits(budgets, items, frames)


def _by_path(config: EncoderCudaGraphConfig, given: Budgeted) -> dict[str, Sequence[int]]:
    if not isinstance(given, Mapping):
        return {path: tuple(given) for path in config.graph_sets}
    if set(given) != set(config.graph_sets):
        expected = f"budgets for each of {', '.join(config.graph_sets)}"
        raise ConfigError.bad_value(
            name="token_budgets", where="encoder graphs", value=dict(given), expected=expected
        )
    return {path: tuple(given[path]) for path in config.graph_sets}


def _given(
    by_path: dict[str, Sequence[int]], max_items: int | None, budget_range: Range | None
) -> tuple[dict[str, tuple[int, ...]], int]:
    found: dict[str, Budgets] = {}
    for path, budgets in by_path.items():
        # numbers that are none are for resolve_budgets to name
        numbers = [number for each in budgets if (number := whole(each)) and number > 0]
        span = budget_range or (min(numbers, default=1), max(numbers, default=1))
        found[path] = resolve_budgets(budgets, max_items, budget_range=span)
    items = min(each.max_items for each in found.values())
    return {path: each.budgets for path, each in found.items()}, items


def _inferred(
    config: EncoderCudaGraphConfig, max_items: int | None, span: Range
) -> tuple[dict[str, tuple[int, ...]], int]:
    base = resolve_budgets(None, max_items, budget_range=span)
    most = base.budgets[-1]
    sets = config.graph_sets.items()
    starts = {path: each.min_token_budget or base.budgets[0] for path, each in sets}
    for path, least in starts.items():
        if least > most:  # budgets below it would hold no item of this path
            raise EncoderError.path_above_range(path=path, least=least, most=most)
    items = base.max_items
    if max_items is None:
        items = min(items, *starts.values())
    return {
        path: generated_budgets(max(least, items), most) for path, least in starts.items()
    }, items
