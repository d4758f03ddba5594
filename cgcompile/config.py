"""The settings: the frozen ``CompilationConfig``. Its two modes are in ``modes.py``.

Imports are the standard library, ``errors``, ``modes`` and ``settings`` only: the table can be read
without torch. The rule: settings are values, fixed at construction; results never live here.
"""

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cgcompile.errors import ConfigError
from cgcompile.modes import TORCH_MODES, CompilationMode, CUDAGraphMode
from cgcompile.settings import (
    AUTO,
    ENV_PREFIX,
    NO_BUILTIN,
    SPLIT,
    UNSET,
    UP_TO,
    Parser,
    ends_of,
    enum_parser,
    items_of,
    kernel_switches,
    kernels_of,
    one_of,
    optional,
    parse_bool,
    parse_compile_sizes,
    parse_compiler,
    parse_count,
    parse_endpoints,
    parse_kernels,
    parse_mapping,
    parse_names,
    parse_ops,
    parse_parts,
    parse_passes,
    parse_pipeline,
    parse_sizes,
    parse_switch,
    parse_text,
    parsed,
    setting,
    sizes_meant,
    warn_of_earlier,
)

# What a setting may need to have an effect, with the reason and the advice where that is absent.
_NEEDS = {
    "pieces": ("only mode PIECEWISE splits the graph and compiles pieces", "use mode PIECEWISE"),
    "trace": ("breakable capture traces nothing", "use splitting 'fx'"),
    "graphs": ("nothing is captured", "set cudagraph_mode, for example to FULL"),
    "inductor": ("nothing there is compiled by Inductor", "use compiler 'inductor'"),
    "attention": (
        "attention stays outside of piecewise graphs, and as it is in what is not traced",
        "use splitting 'fx', a mode other than NONE, and a cudagraph_mode such as FULL",
    ),
    "split": (
        "piecewise graphs need a split graph",
        "use mode PIECEWISE, or one of the CUDA graph modes NONE, FULL, FULL_DECODE_ONLY",
    ),
}


CHECKS = ("metadata", "state", "weights")
DEBUG = ("stale", "poison")


class Earlier(NamedTuple):
    """An earlier name of a setting, which works for one release."""

    setting: str  # what takes over
    advice: str  # how it is given there
    parse: Parser
    merged: Callable[[Any, Any], Any]  # (value, the setting before) -> the setting
    read: Callable[[Any], Any] | None = None  # the setting -> the value; None: a property has it

    def remedy(self, value: Any) -> str:
        """Return what to write in place of the earlier name, where the setting is ``value``."""
        if value is None or _is_plain(value):
            return f"use {self.setting}={value!r}"
        return f"use {self.setting}, such as {self.advice}"


def _is_plain(value: Any) -> bool:
    """Return whether a setting can be written as it is: no object of the user is in it."""
    return all(isinstance(item, (str, int)) for item in items_of(value))


def _with_part(known: tuple[str, ...], name: str, on: bool, before: Any) -> tuple[str, ...]:
    """Return names of ``known``: those of ``before``, with another one or without it."""
    return tuple(part for part in known if (on if part == name else part in before))


def _part(setting: str, known: tuple[str, ...], name: str, sign: str = "") -> Earlier:
    """Return the earlier name of a part of a setting, which was a switch."""
    merged = functools.partial(_with_part, known, name)
    advice = f"{setting}='{sign}{name}'"
    return Earlier(setting, advice, parse_bool, merged, lambda parts: name in parts)


def _kernel(name: str) -> Earlier:
    """Return the earlier name of a kernel, which had a setting of its own."""

    def merged(switch: bool | str, before: Any) -> Any:
        return kernels_of({**kernel_switches(before), name: switch})

    def read(kernels: Any) -> bool | str:
        return kernel_switches(kernels)[name]

    return Earlier("kernels", f"kernels='-{name}'", parse_switch, merged, read)


def _divided(passes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return passes over the graph, those over pieces, and the names of those to leave out."""
    objects = [item for item in passes if not isinstance(item, str) or item == SPLIT]
    left_out = (item for item in passes if isinstance(item, str) and item != SPLIT)
    end = objects.index(SPLIT) if SPLIT in objects else len(objects)
    names = tuple(item.removeprefix("-") for item in left_out)
    return [tuple(objects[:end]), tuple(objects[end + 1 :]), names]


def _passes(advice: str, parse: Parser, part: int) -> Earlier:
    """Return the earlier name of a part of ``passes``."""

    def merged(value: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = _divided(before)
        parts[part] = value
        return parse_pipeline((*parts[0], SPLIT, *parts[1], *(f"-{name}" for name in parts[2])))

    return Earlier("passes", advice, parse, merged)


def _builtin(on: bool, before: tuple[Any, ...]) -> tuple[Any, ...]:
    own = tuple(op for op in before if not (isinstance(op, str) and op == NO_BUILTIN))
    return own if on else (NO_BUILTIN, *own)


def _has_builtin(ops: tuple[Any, ...]) -> bool:
    return not any(isinstance(op, str) and op == NO_BUILTIN for op in ops)


def _endpoints(ends: tuple[int, ...] | None, before: Any) -> tuple[int | str, ...] | None:
    own = (item for item in before or () if not str(item).startswith(UP_TO))
    return (*own, *(f"{UP_TO}{end}" for end in ends or ())) or None


def _on_error(action: str, before: Any) -> Any:
    first = before[0] if isinstance(before, tuple) else before
    return (first, "eager") if action == "eager" and first != "eager" else first


def _strict(on: bool, before: str) -> str:
    if on:
        return "raise"
    return "warn" if before == "raise" else before


def _warns(on: bool, before: str) -> str:
    if before == "raise":
        return before
    return "warn" if on else "count"


def with_check(part: str, config: "CompilationConfig", on: bool) -> "CompilationConfig":
    """Return settings with or without a part of ``checks``."""
    return dataclasses.replace(config, checks=_with_part(CHECKS, part, on, config.checks))


EARLIER = {
    "builtin_splitting_ops": Earlier(
        "splitting_ops", "splitting_ops='-builtin'", parse_bool, _builtin, _has_builtin
    ),
    "check_metadata": _part("checks", CHECKS, "metadata", "-"),
    "check_state": _part("checks", CHECKS, "state", "-"),
    "compile_ranges_endpoints": Earlier(
        "compile_sizes", "compile_sizes='<=32,<=512'", optional(parse_endpoints), _endpoints
    ),
    "decode_attention": _kernel("decode_attention"),
    "disabled_passes": _passes("passes='-eliminate_clones'", parse_names, 2),
    "graph_passes": _passes("passes=(of_the_graph, 'split', of_pieces)", parse_passes, 0),
    "on_compile_error": Earlier(
        "compiler",
        "compiler='inductor,eager'",
        one_of("raise", "eager"),
        _on_error,
        lambda compiler: "eager" if isinstance(compiler, tuple) else "raise",
    ),
    "piece_passes": _passes("passes=(of_the_graph, 'split', of_pieces)", parse_passes, 1),
    "poison": _part("debug", DEBUG, "poison"),
    "small_batch_kernels": _kernel("small_batch"),
    "strict": Earlier("on_fallback", "on_fallback='raise'", parse_bool, _strict),
    "warn_fallbacks": Earlier("on_fallback", "on_fallback='count'", parse_bool, _warns),
}


def by_present_names(
    settings: Mapping[str, Any], where: str, before: Callable[[str], Any]
) -> dict[str, Any]:
    """Return settings by their present names; an earlier name is a FutureWarning.

    Args:
        settings: values by name.
        where: shown in errors.
        before: returns the value of a setting that is not among them.
    """
    parsers = {spec.name: spec.metadata["parse"] for spec in dataclasses.fields(CompilationConfig)}
    present = {name: value for name, value in settings.items() if name not in EARLIER}
    named = [name for name in settings if name in EARLIER]
    for name in named:
        earlier = EARLIER[name]
        new = earlier.setting
        value = parsed(name, where, settings[name], earlier.parse)
        merges = present.get(new, UNSET) is not UNSET
        old = parsed(new, where, present[new], parsers[new]) if merges else before(new)
        present[new] = earlier.merged(value, old)
    for name in named:
        earlier = EARLIER[name]
        remedy = earlier.remedy(present[earlier.setting])
        warn_of_earlier(f"setting {name} is deprecated: {remedy}")
    return present


_PRESENT = {name: earlier.setting for name, earlier in EARLIER.items()}  # by earlier names

C_ = TypeVar("C_", bound=type)


def _takes_earlier_names(cls: C_) -> C_:
    """Let the constructor take earlier names of settings, and refuse unknown ones with advice."""
    kind: Any = cls
    init = kind.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        specs = {spec.name: spec for spec in dataclasses.fields(self)}
        for name, value in settings.items():
            if name in specs or name in EARLIER:
                continue
            if not (name == "_origins" and isinstance(value, _Origins)):
                raise ConfigError.unknown_setting(
                    name=name, where="arguments", known=[*specs], earlier=_PRESENT
                )
        if not EARLIER.keys().isdisjoint(settings):
            settings = by_present_names(
                settings, "CompilationConfig", lambda name: _of_environment(specs[name])[0]
            )
        init(self, *args, **settings)

    kind.__init__ = __init__
    return cls


def _of_environment(spec: dataclasses.Field[Any]) -> tuple[Any, str]:
    """Return the value of a setting in the environment, else its default, and its origin."""
    value, origin = spec.metadata["default"], "default"
    variable = _variable(spec.name)
    if os.environ.get(variable):  # an empty one is not set
        value = parsed(spec.name, variable, os.environ[variable], spec.metadata["parse"])
        origin = "environment"
    old = [
        (_variable(name), name, earlier)
        for name, earlier in EARLIER.items()
        if earlier.setting == spec.name and os.environ.get(_variable(name))
    ]
    for variable, name, earlier in old:
        value = earlier.merged(parsed(name, variable, os.environ[variable], earlier.parse), value)
        origin = "environment"
    for variable, _, _ in old:
        text = ",".join(map(str, () if value is None else items_of(value)))
        if value == () and spec.name in ("checks", "debug"):
            text = "0"  # of the others no text stands for no items
        warn_of_earlier(f"{variable} is deprecated: use {_variable(spec.name)}={text}")
    return value, origin


class _Origins(dict[str, tuple[str, Any]]):
    """The origin and the value of each setting; a type of its own, which no user passes."""


@_takes_earlier_names
@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Every setting of cgcompile; validated when it is made, immutable after.

    Each field can be given as an argument here, as ``torch.compile(..., options={name: value})``,
    or as ``CGCOMPILE_<NAME>`` in the environment, where an empty text is no value. An argument
    beats options, options beat the environment, the environment beats the default.

    Which combinations are possible:

    ==================== ============================================ =========================
    ``mode``             ``cudagraph_mode`` (default first)            pieces, passes and sizes
    ==================== ============================================ =========================
    NONE                 NONE, FULL, FULL_DECODE_ONLY                 not settable
    STOCK_TORCH_COMPILE  NONE, FULL, FULL_DECODE_ONLY                 not settable
    DYNAMO_TRACE_ONCE    NONE, FULL, FULL_DECODE_ONLY                 not settable
    PIECEWISE            FULL_AND_PIECEWISE, all others               settable
    ==================== ============================================ =========================

    "Pieces, passes and sizes" are the settings from ``compiler`` to ``dump_passes``, but for
    ``inductor_options``, which need a mode and a compiler that use Inductor. Those from
    ``capture_device`` on need a mode with CUDA graphs. One that would be ignored is an error.

    Attributes:
        mode: how much is compiled: ``NONE``, ``STOCK_TORCH_COMPILE`` (not split, compiled by
            Inductor), ``DYNAMO_TRACE_ONCE`` (the same, traced once), or ``PIECEWISE``.
        cudagraph_mode: which CUDA graphs serve a step; unset: the first in the table above.
        compiler: what compiles a piece: ``inductor``, ``aot`` (functorch's ATen graph, run op by
            op), ``eager``, or a callable ``(gm, fake_inputs) -> callable``. ``inductor,eager``: a
            piece for which it raises runs uncompiled, counted in the record of the compilation;
            else that is an error with the piece and your line.
        inductor_options: settings of ``torch._inductor.config``, as a mapping or JSON text.
        splitting: ``fx``: the traced graph is cut at its boundaries. ``breakable``: nothing is
            traced, capture breaks where a splitting op runs; needs ``cgcompile.compile()``.
        splitting_ops: boundaries beside the built-in attention ops: names, ops, functions or
            ``SplittingOp`` objects. With an item ``"-builtin"`` those are none.
        passes: your passes over the whole graph; after an item ``"split"`` those over each distinct
            captured piece. ``"-name"`` leaves a pass out: one of yours, ``eliminate_noops`` or
            ``eliminate_clones``.
        cudagraph_capture_sizes: sizes of the batch dimension that will be captured; each is
            checked against the guards.
        compile_sizes: sizes of the batch dimension for which each piece is compiled separately;
            the text ``cudagraph_capture_sizes`` stands for all of that setting. Items ``<=32`` and
            ``<=512`` compile the ranges 1 to 32, 33 to 512, and 513 and more separately; a size
            beats its range.
        capture_dim: the input dimension of these sizes and of padding rows, such as
            ``x.size()[0]``; needed if several vary.
        pad_lengths: lengths to which a call without a forward context is padded, so that varying
            lengths share graphs: the last size of each mask ``[rows, length]``, an input whose name
            ends in "mask" and is 0 at padding. Other inputs of that size are padded too, with
            zeros; results are cut. Calls 1, 2, 4, 8 and so on of a padded shape, and those with
            more padding than before, are compared with unpadded ones; if one differs, nothing is
            padded from then on, counted as ``padding_refused``.
        kernels: the kernels of cgcompile that replace ops. ``auto``: each where the device can,
            which is an NVIDIA H100 or newer data-centre GPU with Triton. False: no kernel.
            ``-decode_attention``: each but that. True, or names: those also where ``auto`` leaves
            them out. Results differ by rounding. ``small_batch``: linear layers of at most 16 rows,
            with the RMS norm before and the activation or residual after them, by one kernel, and
            rotary embeddings with the writes to a static cache by another. Weights of int8 and
            float8 with a scale for each row are read as they are. It needs Inductor; by name it
            raises where the device cannot. If one dimension is dynamic, or ``capture_dim`` names
            that of the batch, sizes up to 16 are compiled separately. ``decode_attention``:
            attention of few query rows by a kernel that reads heads which share keys once, and no
            key that the mask excludes from all rows. It is captured, also by the piecewise graphs
            of FULL_AND_PIECEWISE. In mode PIECEWISE attention stays. By name it runs on any device,
            by ops of torch where the kernel does not run. Attention stays that ``splitting_ops``
            names, or that is traced under ``sdpa_kernel``.
        dump_passes: a folder for the graph before and after every pass, as text.
        cache_dir: the folder that keeps compiled pieces for other processes, or ``off``. Unset:
            cgcompile in $XDG_CACHE_HOME, or in ~/.cache. It is loaded as code: you or root must
            own it, alone.
        capture_device: ``auto``: CUDA graphs for CUDA tensors, nothing for CPU tensors. ``host``:
            graphs of CPU tensors too, by a slow recorder with the rules of CUDA graphs, for tests.
        on_fallback: where a step runs without a graph for an avoidable reason: ``raise``; ``warn``:
            count it, and log a warning with the remedy, once for each reason and handle; or only
            ``count`` it.
        on_input_change: under a forward context, if the address of an input or a number differs
            from capture: ``raise``, ``recapture`` (bounded by ``max_captured_shapes``) or run
            ``eager``. ``copy``: inputs that are only read are copied, from any address; compiled
            models only.
        checks: what is compared with the capture before a replay; True is all, False nothing.
            ``metadata``: address, shape, strides and dtype of the tensors of the forward context,
            if a captured op has read it, as ops of FULL graphs may: all of them, down to eight
            levels of objects, because which ones it has read is unknown. ``-metadata``, which is
            all but that, is right where no captured op reads the metadata, or reads it by its
            address alone, whatever its size. ``state``: what captured Python code may have read of
            a model, in wrappers and managers: attributes, items of containers, closures, globals,
            hooks, and tensors in them. ``-state`` saves a few microseconds a step, and repeats what
            the capture read. ``weights``: objects and addresses of all weights, in managers, 0.07
            us a weight. With ``-weights`` release and capture again where one is replaced.
        debug: find reads of the wrong memory; True is all, and slow. ``stale``: raise where a
            result is touched whose memory a later step has overwritten. ``poison``: fill the memory
            of graphs with NaN before each replay; of a shared pool, only what neither results nor
            other tensors hold.
        num_warmups: calls of a new shape that run without a graph before one is captured. Inductor
            tunes a kernel when it first runs, which a capture does not allow: with 0 a step whose
            kernels have not run before stays without a graph, and is counted as capture_failed.
        max_captured_shapes: how many shapes are captured without a forward context, per graph and
            weight set.
        max_weight_sets: maximum number of weight sets (and mutated inputs) for which one graph is
            captured.

    Raises:
        ConfigError: unknown, malformed or impossible settings, with close matches.

    Example:
        >>> config = cgcompile.CompilationConfig(mode="NONE", cudagraph_mode="FULL")
        >>> config.cudagraph_mode.name, config.num_warmups
        ('FULL', 1)
    """

    mode: CompilationMode = setting(CompilationMode.PIECEWISE, enum_parser(CompilationMode))
    cudagraph_mode: CUDAGraphMode | None = setting(
        None, optional(enum_parser(CUDAGraphMode)), "split"
    )
    compiler: str | Callable[..., Any] | tuple[Any, ...] = setting(
        "inductor", parse_compiler, "pieces"
    )
    inductor_options: tuple[tuple[str, Any], ...] = setting((), parse_mapping, "inductor")
    splitting: str = setting("fx", one_of("fx", "breakable"), "pieces")
    splitting_ops: tuple[Any, ...] = setting((), parse_ops, "pieces")
    passes: tuple[Any, ...] = setting((), parse_pipeline, "trace")
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None, optional(parse_sizes), "pieces")
    compile_sizes: tuple[int | str, ...] | None = setting(
        None, optional(parse_compile_sizes), "trace"
    )
    capture_dim: str | None = setting(None, optional(parse_text), "trace")
    pad_lengths: tuple[int, ...] | None = setting(None, optional(parse_sizes), "trace")
    kernels: bool | str | tuple[str, ...] = setting(AUTO, parse_kernels, "kernels")
    dump_passes: str | None = setting(None, optional(parse_text), "trace")

    cache_dir: str | None = setting(None, optional(parse_text))
    capture_device: str = setting("auto", one_of("auto", "host"), "graphs")
    on_fallback: str = setting("warn", one_of("warn", "raise", "count"), "graphs")
    on_input_change: str = setting("raise", one_of("raise", "copy", "recapture", "eager"), "graphs")
    checks: tuple[str, ...] = setting(CHECKS, parse_parts(*CHECKS), "graphs")
    debug: tuple[str, ...] = setting((), parse_parts(*DEBUG), "graphs")
    num_warmups: int = setting(1, parse_count(0), "graphs")
    max_captured_shapes: int = setting(64, parse_count(0), "graphs")
    max_weight_sets: int = setting(128, parse_count(1), "graphs")

    # Not a field, so no part of equality and hashing; ``dataclasses.replace`` passes it on.
    _origins: InitVar[_Origins | None] = None

    def __post_init__(self, _origins: _Origins | None) -> None:
        variables = list(map(_variable, self.names()))
        earlier = {_variable(name): _variable(present) for name, present in _PRESENT.items()}
        for variable in sorted(os.environ):
            if variable.startswith(ENV_PREFIX) and variable not in {*variables, *earlier}:
                raise ConfigError.unknown_setting(
                    name=variable, where="environment", known=variables, earlier=earlier
                )
        origins = {}
        for spec in dataclasses.fields(self):
            value, origin = self._parsed_with_origin(spec)
            kept = None if _origins is None else _origins.get(spec.name)
            origins[spec.name] = kept[0] if kept is not None and kept[1] == value else origin
            object.__setattr__(self, spec.name, value)
        for spec in dataclasses.fields(self):
            origins[spec.name] = self._settle(spec, origins[spec.name])
        if self.cudagraph_mode is None:
            default = CUDAGraphMode.FULL_AND_PIECEWISE if self._splits else CUDAGraphMode.NONE
            object.__setattr__(self, "cudagraph_mode", default)
        _ = self.sizes_to_compile  # raises where they cannot be
        pairs = {name: (origin, getattr(self, name)) for name, origin in origins.items()}
        object.__setattr__(self, "_origins", _Origins(pairs))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value of a setting by its earlier name."""
            earlier = EARLIER.get(name)
            if earlier is None or earlier.read is None:
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            warn_of_earlier(f"config.{name} is deprecated: read config.{earlier.setting}")
            return earlier.read(getattr(self, earlier.setting))

    def _parsed_with_origin(self, spec: dataclasses.Field[Any]) -> tuple[Any, str]:
        """Return the value of an argument, else of the environment, else the default."""
        value, parse = getattr(self, spec.name), spec.metadata["parse"]
        if value is not UNSET:
            return parsed(spec.name, "CompilationConfig", value, parse), "argument"
        return _of_environment(spec)

    def _settle(self, spec: dataclasses.Field[Any], origin: str) -> str:
        """Refuse a setting without effect, or reset it; return its origin."""
        # The environment is for all models: what has no effect for one of them is no error.
        value, default = getattr(self, spec.name), spec.metadata["default"]
        missing = self._missing(spec.metadata["needs"])
        if missing is None or (value == default and origin != "environment"):
            return origin
        if origin == "environment":
            object.__setattr__(self, spec.name, default)
            return "default"
        because, instead = _NEEDS[missing]
        text = value.name if isinstance(value, enum.Enum) else repr(value)
        raise ConfigError.impossible(
            what=f"{spec.name} = {text} with mode {self.mode.name}",
            because=because,
            instead=f"Leave {spec.name} out, or {instead}.",
        )

    def _missing(self, needs: str | None) -> str | None:
        """Return which of ``_NEEDS`` a setting with such needs lacks, or None."""
        if needs == "trace" and not self._splits:
            return "pieces"
        if needs == "kernels":
            return self._missing_for_kernels()
        present = {
            "pieces": self._splits,
            "trace": self.splitting == "fx",
            "graphs": self._splits or self.cudagraph_mode not in (None, CUDAGraphMode.NONE),
            "inductor": self.first_compiler == "inductor" and self.mode is not CompilationMode.NONE,
            "attention": self._holds_attention,
            "split": self._splits
            or self.cudagraph_mode is None
            or not self.cudagraph_mode.requires_piecewise_compilation(),
        }
        return None if needs is None or present[needs] else needs

    def _missing_for_kernels(self) -> str | None:
        """Return what a kernel that was named needs; of all kernels, what the first one needs."""
        lacking = {"small_batch": self._missing("inductor")}
        lacking["decode_attention"] = self._missing("attention")
        wanted = [lacking[name] for name, on in kernel_switches(self.kernels).items() if on is True]
        if self.kernels is True and None in wanted:  # those that can
            return None
        return next((needs for needs in wanted if needs is not None), None)

    @property
    def _splits(self) -> bool:
        return self.mode is CompilationMode.PIECEWISE

    @property
    def _holds_attention(self) -> bool:
        """Whether graphs may hold attention: it is traced, and not kept between piecewise ones."""
        if self.splitting != "fx" or self.mode is CompilationMode.NONE:
            return False
        if self.cudagraph_mode in (None, CUDAGraphMode.NONE):
            return self._splits
        return self.cudagraph_mode is not CUDAGraphMode.PIECEWISE

    @property
    def first_compiler(self) -> Any:
        """What compiles a piece, without what takes over where that raises."""
        return self.compiler[0] if isinstance(self.compiler, tuple) else self.compiler

    @property
    def compile_ranges_endpoints(self) -> tuple[int, ...] | None:
        """The ends of ranges of sizes, see ``compile_sizes``; None without any."""
        return ends_of(self.compile_sizes) or None

    @property
    def graph_passes(self) -> tuple[Any, ...]:
        """The passes over the whole graph, see ``passes``."""
        return _divided(self.passes)[0]

    @property
    def piece_passes(self) -> tuple[Any, ...]:
        """The passes over pieces, see ``passes``."""
        return _divided(self.passes)[1]

    @property
    def disabled_passes(self) -> tuple[str, ...]:
        """The names of passes to leave out, see ``passes``."""
        return _divided(self.passes)[2]

    @property
    def strict(self) -> bool:
        """Whether a step without a graph raises, see ``on_fallback``."""
        return self.on_fallback == "raise"

    @property
    def warn_fallbacks(self) -> bool:
        """Whether what is no error is logged, see ``on_fallback``."""
        return self.on_fallback != "count"

    @property
    def replaces_attention(self) -> str | bool:
        """The switch of the kernel ``decode_attention`` for one graph: False without effect."""
        return self._holds_attention and kernel_switch(self, "decode_attention")

    @property
    def origins(self) -> dict[str, str]:
        """Where each setting comes from.

        ``argument``, ``options`` or ``mode`` of ``torch.compile``, ``environment``, ``default``.
        ``dataclasses.replace`` keeps the origin of unchanged settings.
        """
        return {name: origin for name, (origin, _) in self.__dict__["_origins"].items()}

    @property
    def sizes_to_compile(self) -> tuple[int, ...]:
        """The sizes of ``compile_sizes``, in order, each once."""
        pads = self.cudagraph_mode is not CUDAGraphMode.NONE
        return sizes_meant(self.compile_sizes or (), self.cudagraph_capture_sizes, pads=pads)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings, in order."""
        return tuple(spec.name for spec in dataclasses.fields(cls))

    @classmethod
    def resolve(
        cls,
        config: Any = None,
        *,
        options: Mapping[str, Any] | None = None,
        torch_mode: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> "CompilationConfig":
        """Return one configuration from several sources; the later of the arguments here wins.

        Args:
            config: the settings to start from; environment and defaults if left out.
            torch_mode: ``mode`` of ``torch.compile``, such as ``"reduce-overhead"``.
            options: ``options`` of ``torch.compile``.
            arguments: settings given as keyword arguments.

        Raises:
            ConfigError: unknown, malformed or impossible settings, with close matches.
        """
        if config is not None and not isinstance(config, cls):
            expected = "a CompilationConfig; give single settings by name"
            raise ConfigError.bad_value(
                name="config", where="Backend", value=config, expected=expected
            )
        specs = {spec.name: spec for spec in dataclasses.fields(cls)}
        changes: dict[str, Any] = {}
        origins = _Origins({} if config is None else config.__dict__["_origins"])

        def before(name: str) -> Any:
            if name in changes:
                return changes[name]
            return _of_environment(specs[name])[0] if config is None else getattr(config, name)

        for origin, where, settings in (
            ("mode", "torch.compile", _settings_of_torch_mode(torch_mode)),
            ("options", "options", {} if options is None else options),
            ("argument", "arguments", {} if arguments is None else arguments),
        ):
            if not isinstance(settings, Mapping):
                raise ConfigError.no_mapping(
                    name=where, value=settings, is_config=isinstance(settings, cls)
                )
            for name in settings:
                if name not in specs and name not in EARLIER:
                    raise ConfigError.unknown_setting(
                        name=str(name), where=where, known=cls.names(), earlier=_PRESENT
                    )
            for name, value in by_present_names(settings, where, before).items():
                changes[name] = parsed(name, where, value, specs[name].metadata["parse"])
                origins[name] = origin, changes[name]
        if config is None:
            return cls(**changes, _origins=origins)
        return dataclasses.replace(config, **changes, _origins=origins)


def kernel_switch(config: CompilationConfig, name: str) -> str | bool:
    """Return the switch of a kernel: ``"auto"``, True (raise where it cannot run) or False."""
    switch = kernel_switches(config.kernels)[name]
    # The environment is for all models: no model is one that cannot.
    return AUTO if switch and config.origins["kernels"] == "environment" else switch


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _settings_of_torch_mode(mode: Any) -> Mapping[str, Any]:
    """Return the settings that ``mode`` of ``torch.compile`` stands for."""
    if not isinstance(mode, str | None):
        raise ConfigError.bad_value(
            name="mode", where="torch.compile", value=mode, expected="a text or None"
        )
    if mode is not None and mode not in TORCH_MODES:
        raise ConfigError.unknown_torch_mode(mode=mode, known=tuple(TORCH_MODES))
    return TORCH_MODES[mode or "default"]
