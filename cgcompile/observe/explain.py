"""``cgcompile.explain(model, *args)``: what would be split where, and why, before anything runs.

The call is traced as :func:`cgcompile.compile` traces it, on tensors without memory, and split as
the settings say; then the trace is forgotten. So it needs no GPU, and no memory for the weights.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig, CompilationMode
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.observe.explanation import VERSION, Explanation
from cgcompile.observe.parts import GraphBreak, SourceLine, settings_of
from cgcompile.observe.report import Reporter, data_breaks, mode_report
from cgcompile.observe.targets import resolved
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.splitting import check_sizes, split_as_set
from cgcompile.settings import checked_but, sizes_given
from cgcompile.tracing.look import Look
from cgcompile.tracing.variant import SHAPES, Rules

_FIX = (
    "Change that line, put it into an op of your own, or take torch.compile(model, "
    "backend='cgcompile'), which makes several graphs of it, or splitting='breakable' with "
    "cgcompile.compile(), which needs no trace."
)
_RAISES_FIX = "The model raises with these arguments: call it with ones that it takes."
_META_NOTE = "meta tensors stand for tensors of the device that captures"
_CPU_NOTE = (
    "all tensors are on the CPU, so copies between host and device cannot be told: "
    "make the model under torch.device('meta') to see what a GPU would refuse"
)
_FIRST_NOTE = "what Dynamo says of the code behind the first break is not known before it has run"


@checked_but("config", "sizes", "dynamic_dims")
def explain(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    dynamic_dims: Mapping[str, Any] | None = None,
    dynamic_shapes: str | None = None,
    sizes: Sequence[int] | str = (),
    capture_dim: str | None = None,
    query_lens: Sequence[int] = (1,),
    **kwargs: Any,
) -> Explanation:
    """Say what would be split where, and why; nothing is run, compiled or captured.

    No GPU is needed, and no memory for weights: the model may be on the meta device, or made under
    a ``FakeTensorMode``. Meta tensors stand for those of the device that captures. Tensor arguments
    that are where no weight is are taken to be with the weights: those on the CPU of a meta model,
    unless some argument is on meta too, and those on meta of any other model.

    Your passes and predicates among the settings are called, as they take part in the split. The
    model, the arguments and the globals of its module are as before afterwards. It is traced
    without gradients. It synchronises nothing.

    Args:
        model: a module, bound method or function; or what ``torch.compile`` or
            ``cgcompile.compile`` made of one, whose settings are then taken.
        *args: of the call.
        config: the settings: a config, a backend, or a mapping as for ``options``; environment and
            defaults if left out.
        dynamic_dims: which dimensions vary, as for :func:`cgcompile.compile`; that of a compiled
            model if left out.
        dynamic_shapes: what a trace may assume of them, as there.
        sizes: sizes of the batch dimension for which bytes are wanted as numbers, beside those of
            this call, as numbers or as text ``"8,64"``; left out: ``cudagraph_capture_sizes``.
        capture_dim: which dimension they are sizes of, such as ``"x.size()[0]"``, where several
            vary; left out: the setting of that name.
        query_lens: tokens per request of uniform decode, for the mode that would result.
        **kwargs: of the call.

    Returns:
        What was found. Where the call does not become one graph, or the settings trace nothing,
        there are no pieces, and ``breaks`` and ``notes`` say why.

    Raises:
        ConfigError: settings or dimensions that cannot be.
        TraceError: a dimension that is to vary is fixed by the model, or does not exist.
        SymbolError: a size that no input gives would cross into a captured piece.
        PassError: a pass raised or left an invalid graph.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.
    """
    wanted = sizes_given("sizes", "explain", sizes)
    runnable, settings, dims, rules = _looked_at(model, config, dynamic_dims, dynamic_shapes)
    chosen = resolved(settings, "explain")
    find = functools.partial(_found, runnable, chosen, (wanted, capture_dim))
    if chosen.splitting == "breakable":
        return find(None, (), _untraced(chosen), query_lens)
    args, kwargs = _with_weights(runnable, args, kwargs)
    look = Look(runnable, dims, rules)
    whole: list[SplitGraph] = []

    def split(graph: Any, inputs: Any) -> None:
        whole.append(split_as_set(graph, chosen)[0])

    try:
        look.at(args, kwargs, split)
    except compat.CannotTrace as error:
        return find(None, (_broken(error),), (_FIRST_NOTE,), query_lens)
    if not whole:
        return find(None, (), ("the call computes nothing with tensors",), query_lens)
    return find(whole[-1], data_breaks(whole[-1]), _notes(whole[-1], chosen), query_lens)


def _looked_at(
    model: Any,
    config: Any,
    dims: Mapping[str, Any] | None,
    shapes: str | None,
) -> tuple[Any, Any, Mapping[str, Any] | None, Rules]:
    """(what to trace, settings, dimensions, rules) of a model, compiled or not."""
    if shapes is not None and shapes not in SHAPES:
        raise ConfigError.bad_value(
            name="dynamic_shapes", where="explain", value=shapes, expected=f"one of {SHAPES}"
        )
    given = Rules() if shapes is None else Rules(shapes=shapes)
    if isinstance(model, CompiledModel):
        own_dims, own_rules = model.asked
        given = own_rules if shapes is None else given
        model, config = model.unwrap(), model.backend if config is None else config
        dims = own_dims if dims is None else dims
    else:
        original = getattr(model, "_orig_mod", None)  # what torch.compile returned
        if original is not None:
            config = handle_of(model) if config is None else config
            model = original
    check_compilable(model, "explain")
    return model, config, dims, given


def _found(
    model: Any,
    config: CompilationConfig,
    asked: tuple[Sequence[int], str | None],
    split: SplitGraph | None,
    breaks: tuple[GraphBreak, ...],
    notes: tuple[str, ...],
    query_lens: Sequence[int],
) -> Explanation:
    reporter = None
    if split is not None:
        dims, (sizes, dim) = list(split.symbols.dims.values()), asked
        if dim is not None and dim not in dims:
            expected = f"one of {', '.join(dims)}" if dims else "none, as no dimension varies"
            raise ConfigError.bad_value(
                name="capture_dim", where="explain", value=dim, expected=expected
            )
        reporter = Reporter.asked(split, config, sizes, dim)
    return Explanation(
        version=VERSION,
        model=getattr(model, "__qualname__", type(model).__name__),
        device=None if split is None else str(split.device),
        traced=split is not None,
        pieces=() if reporter is None else reporter.pieces(),
        symbols=() if reporter is None else reporter.symbols(),
        totals=None if reporter is None else reporter.totals(),
        breaks=breaks,
        modes=mode_report(split, config, query_lens),
        settings=settings_of(config),
        notes=notes,
        split=split,
    )


def _with_weights(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments where the weights are."""
    module = getattr(model, "__self__", model)
    if not isinstance(module, torch.nn.Module):
        return args, kwargs
    weights = {each.device for each in (*module.parameters(), *module.buffers())}
    given = {each.device.type for each in compat.tree_tensors((args, kwargs))}
    if not weights or (any(each.type == "meta" for each in weights) and "meta" in given):
        return args, kwargs
    wanted = next((each for each in weights if each.type == "meta"), None)
    moved = "cpu" if wanted is not None else "meta"
    target = wanted or next(iter(weights))

    def there(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == moved:
            return compat.without_memory(leaf, target)
        return leaf

    return compat.tree_map(there, args), compat.tree_map(there, kwargs)


def _untraced(config: CompilationConfig) -> tuple[str, ...]:
    registry = Boundaries(config.splitting_ops, builtin=config.builtin_splitting_ops)
    can = [each.name for each in registry if each.predicate is None]
    return (
        "splitting='breakable' traces nothing: which parts there are is known once a capture has "
        "run, and then cgcompile.coverage(model) tells which graphs there are",
        f"captures will break at decorated functions and at {len(can)} registered ops that run: "
        + ", ".join(can),
        "not told: symbols, sizes, bytes, graph breaks. explain() with splitting='fx' tells what a "
        "trace would give",
    )


def _broken(error: compat.CannotTrace) -> GraphBreak:
    line = None if error.line is None else SourceLine(*error.line)
    fix = _RAISES_FIX if error.model_raises else _FIX
    return GraphBreak("cgcompile.compile", error.what, error.hints, line, fix)


def _notes(split: SplitGraph, config: CompilationConfig) -> tuple[str, ...]:
    found = []
    if split.device.type == "meta":
        found.append(_META_NOTE)
    if split.device.type == "cpu":
        found.append(_CPU_NOTE)
    if config.mode is CompilationMode.NONE:
        found.append("mode NONE compiles nothing; pieces show what would go into a FULL graph")
    try:
        check_sizes(split, config)
    except SymbolError as error:
        found.append(f"compiling will raise SymbolError: {error}")
    return tuple(found)
