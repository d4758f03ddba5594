"""What a user can set: compilation mode, CUDA graph mode, and the frozen ``CompilationConfig``.

Module-level imports are the standard library and ``errors`` only, so that the table of settings can
be read (and tested) without torch. The rule: settings are values, fixed at construction; results
of a compilation live in the objects that made them, never here.
"""

import dataclasses
import enum
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cgcompile.errors import ConfigError

ENV_PREFIX = "CGCOMPILE_"


class CompilationMode(enum.Enum):
    """How much of the model is compiled, and in how many parts."""

    NONE = 0  # never compile: the traced graph is returned as it is
    STOCK_TORCH_COMPILE = 1  # the whole graph by Inductor, Dynamo's guards kept
    DYNAMO_TRACE_ONCE = 2  # the whole graph, traced once, guards dropped
    PIECEWISE = 3  # split at the boundaries, compiled piece by piece


class CUDAGraphMode(enum.Enum):
    """Which CUDA graphs serve a step.

    A pair means (uniform decode batches, all other batches). Only NONE, PIECEWISE and FULL are
    *runtime* modes, those in which one step can run.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def separate_routine(self) -> bool:
        """Whether uniform decode batches take another mode than the rest."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "CUDAGraphMode":
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The runtime mode of all other batches."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Whether a step can run in the runtime mode ``mode``."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        """The more demanding of the two runtime modes (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def requires_piecewise_compilation(self) -> bool:
        """Whether a step may run piece by piece, so that the graph must be split."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    @classmethod
    def valid_runtime_modes(cls) -> frozenset["CUDAGraphMode"]:
        """The modes in which one step can run."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})


# What torch.compile(mode=...) means here. Inductor's own part of a mode is looked up in torch.
TORCH_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {},  # CUDA graphs are the default here
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {"cudagraph_mode": CUDAGraphMode.NONE},
}

Parser = Callable[[Any], Any]
E_ = TypeVar("E_", bound=enum.Enum)


def _enum_parser(kind: type[E_]) -> Parser:
    def parse(value: Any) -> E_:
        if isinstance(value, kind):
            return value
        if isinstance(value, str) and value.upper() in kind.__members__:
            return kind[value.upper()]
        raise ValueError("one of " + ", ".join(kind.__members__))

    return parse


def _optional(parse: Parser) -> Parser:
    return lambda value: None if value is None or value == "" else parse(value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("a bool: 1, 0, true, false, yes, no, on or off")


def _parse_text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("a non-empty text")


def _items(value: Any) -> tuple[Any, ...]:
    """torch.compile types option values as scalars, so a list may come as text: '1,2,4'."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence):
        return tuple(value)
    return (value,)


def _parse_sizes(value: Any) -> tuple[int, ...]:
    expected = "positive whole numbers, as a sequence or as text '1,2,4'"
    items = _items(value)
    try:
        sizes = [int(item) if isinstance(item, str) else operator.index(item) for item in items]
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not sizes or any(isinstance(item, bool) for item in items) or min(sizes) <= 0:
        raise ValueError(expected)
    return tuple(sorted(set(sizes)))


def _parse_passes(value: Any) -> tuple[Any, ...]:
    for each in _items(value):
        if not (callable(each) and hasattr(each, "name") and callable(getattr(each, "uuid", None))):
            raise ValueError(
                f"objects with a name, uuid() and __call__(gm) -> gm, not {each!r}; wrap a plain "
                "function: cgcompile.passes.FunctionPass(name, function)"
            )
    return _items(value)


def _parse_compiler(value: Any) -> Any:
    if callable(value) or value in COMPILERS:
        return value
    raise ValueError(f"one of {', '.join(COMPILERS)}, or a callable (gm, fake_inputs) -> callable")


def _parse_mapping(value: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"a mapping, or one as JSON text ({error})") from None
    if isinstance(value, tuple) and all(isinstance(pair, tuple) for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a mapping from names to values, or one as JSON text")
    return tuple(sorted(value.items()))


COMPILERS = ("inductor", "aot", "eager")


def _setting(name: str, default: Any, parse: Parser, doc: str, piecewise_only: bool = False) -> Any:
    """A field whose default is the environment variable, where there is one."""

    def from_environment() -> Any:
        text = os.environ.get(ENV_PREFIX + name.upper())
        return default if text is None else _parsed(name, ENV_PREFIX + name.upper(), text, parse)

    metadata = {"parse": parse, "doc": doc, "default": default, "piecewise_only": piecewise_only}
    return field(default_factory=from_environment, metadata=metadata)


def _parsed(name: str, where: str, value: Any, parse: Parser) -> Any:
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ConfigError.bad_value(name, where, value, str(error)) from None


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Every setting of cgcompile; validated when it is made, immutable after.

    Each field can be given as an argument here, as ``torch.compile(..., options={name: value})``,
    or as ``CGCOMPILE_<NAME>`` in the environment. An argument beats options, options beat the
    environment, the environment beats the default.

    Which combinations are possible:

    ==================== ============================================ =========================
    ``mode``             ``cudagraph_mode`` (default first)            pieces, passes and sizes
    ==================== ============================================ =========================
    NONE                 NONE, FULL, FULL_DECODE_ONLY                 not settable
    STOCK_TORCH_COMPILE  NONE, FULL, FULL_DECODE_ONLY                 not settable
    DYNAMO_TRACE_ONCE    NONE, FULL, FULL_DECODE_ONLY                 not settable
    PIECEWISE            FULL_AND_PIECEWISE, all others               settable
    ==================== ============================================ =========================

    "Pieces, passes and sizes" are ``compiler``, ``splitting_ops``, ``builtin_splitting_ops``,
    ``graph_passes``, ``piece_passes``, ``cudagraph_capture_sizes``, ``capture_dim`` and
    ``dump_passes``: with a mode that would ignore them, setting them is an error.
    ``inductor_options`` need a mode and a compiler that use Inductor.

    Raises:
        ConfigError: unknown, malformed or impossible settings, with close matches.
    """

    mode: CompilationMode = _setting(
        "mode",
        CompilationMode.PIECEWISE,
        _enum_parser(CompilationMode),
        "How much is compiled, and in how many parts.",
    )
    cudagraph_mode: CUDAGraphMode | None = _setting(
        "cudagraph_mode",
        None,
        _optional(_enum_parser(CUDAGraphMode)),
        "Which CUDA graphs serve a step. Unset: the first that the table above lists for mode.",
    )
    compiler: str | Callable[..., Any] = _setting(
        "compiler",
        "inductor",
        _parse_compiler,
        "What compiles a piece: 'inductor', 'aot' (functorch's ATen graph, run op by op), 'eager', "
        "or a callable (gm, fake_inputs) -> callable.",
        piecewise_only=True,
    )
    inductor_options: tuple[tuple[str, Any], ...] = _setting(
        "inductor_options",
        (),
        _parse_mapping,
        "Settings of torch._inductor.config for the compiled code, as a mapping or JSON text.",
    )
    splitting_ops: tuple[Any, ...] = _setting(
        "splitting_ops",
        (),
        _items,
        "Boundaries beside the built-in ones: names, ops, functions or SplittingOp objects.",
        piecewise_only=True,
    )
    builtin_splitting_ops: bool = _setting(
        "builtin_splitting_ops",
        True,
        _parse_bool,
        "Whether the built-in attention ops are boundaries.",
        piecewise_only=True,
    )
    graph_passes: tuple[Any, ...] = _setting(
        "graph_passes",
        (),
        _parse_passes,
        "Your passes over the whole graph, before it is split.",
        piecewise_only=True,
    )
    piece_passes: tuple[Any, ...] = _setting(
        "piece_passes",
        (),
        _parse_passes,
        "Your passes over each distinct captured piece, after the split.",
        piecewise_only=True,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = _setting(
        "cudagraph_capture_sizes",
        None,
        _optional(_parse_sizes),
        "Sizes of the batch dimension that will be captured; each is checked against the guards.",
        piecewise_only=True,
    )
    capture_dim: str | None = _setting(
        "capture_dim",
        None,
        _optional(_parse_text),
        "Which input dimension the sizes speak of, such as 'x.size()[0]'; needed if several vary.",
        piecewise_only=True,
    )
    dump_passes: str | None = _setting(
        "dump_passes",
        None,
        _optional(_parse_text),
        "A folder for the graph before and after every pass, as readable text.",
        piecewise_only=True,
    )

    def __new__(cls, *args: Any, **settings: Any) -> "CompilationConfig":
        for name in settings:
            if name not in cls.names():
                raise ConfigError.unknown_setting(name, "arguments", cls.names())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._refuse_unknown_environment()
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            parsed = _parsed(spec.name, "CompilationConfig", value, spec.metadata["parse"])
            object.__setattr__(self, spec.name, parsed)
        self._refuse_ignored_settings()
        self._settle_cudagraph_mode()

    def _refuse_unknown_environment(self) -> None:
        known = [ENV_PREFIX + name.upper() for name in self.names()]
        for variable in sorted(os.environ):
            if variable.startswith(ENV_PREFIX) and variable not in known:
                raise ConfigError.unknown_setting(variable, "environment", known)

    def _refuse_ignored_settings(self) -> None:
        if self.cudagraph_capture_sizes is None and self.capture_dim is not None:
            raise ConfigError.impossible(
                f"capture_dim = {self.capture_dim!r} without cudagraph_capture_sizes",
                "it says which dimension those sizes speak of",
                "Give the sizes, or leave capture_dim out.",
            )
        uses_inductor = self.compiler == "inductor" and self.mode is not CompilationMode.NONE
        if self.inductor_options and not uses_inductor:
            raise ConfigError.impossible(
                f"inductor_options with compiler {self.compiler!r} and mode {self.mode.name}",
                "nothing there is compiled by Inductor",
                "Leave inductor_options out, or use compiler 'inductor'.",
            )
        if self.mode is CompilationMode.PIECEWISE:
            return
        for spec in dataclasses.fields(self):
            changed = getattr(self, spec.name) != spec.metadata["default"]
            if spec.metadata["piecewise_only"] and changed:
                raise ConfigError.impossible(
                    f"{spec.name} = {getattr(self, spec.name)!r} with mode {self.mode.name}",
                    "only mode PIECEWISE splits the graph and compiles pieces",
                    f"Leave {spec.name} out, or use mode PIECEWISE.",
                )

    def _settle_cudagraph_mode(self) -> None:
        split = self.mode is CompilationMode.PIECEWISE
        if self.cudagraph_mode is None:
            settled = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.NONE
            object.__setattr__(self, "cudagraph_mode", settled)
        elif self.cudagraph_mode.requires_piecewise_compilation() and not split:
            raise ConfigError.impossible(
                f"cudagraph_mode {self.cudagraph_mode.name} with mode {self.mode.name}",
                "piecewise graphs need a split graph",
                "Use mode PIECEWISE, or one of the CUDA graph modes NONE, FULL, FULL_DECODE_ONLY.",
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings, in order."""
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
        """One configuration from what several places say; the later of the arguments here wins.

        Args:
            config: where to start from; environment and defaults if left out.
            torch_mode: what ``torch.compile(mode=...)`` was given, such as ``"reduce-overhead"``.
            options: what ``torch.compile(options=...)`` was given.
            arguments: settings given as keyword arguments.
        """
        if config is not None and not isinstance(config, cls):
            expected = "a CompilationConfig; give single settings by name"
            raise ConfigError.bad_value("config", "Backend", config, expected)
        if torch_mode is not None and torch_mode not in TORCH_MODES:
            raise ConfigError.unknown_torch_mode(torch_mode, tuple(TORCH_MODES))
        given: dict[str, Any] = dict(TORCH_MODES[torch_mode or "default"])
        for where, settings in (("options", options or {}), ("arguments", arguments or {})):
            for name, value in settings.items():
                given[name] = cls._parse_setting(name, where, value)
        return dataclasses.replace(config, **given) if config is not None else cls(**given)

    @classmethod
    def _parse_setting(cls, name: str, where: str, value: Any) -> Any:
        if name not in cls.names():
            raise ConfigError.unknown_setting(str(name), where, cls.names())
        spec = next(spec for spec in dataclasses.fields(cls) if spec.name == name)
        return _parsed(name, where, value, spec.metadata["parse"])
