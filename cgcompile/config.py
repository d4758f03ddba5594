"""The settings: the frozen ``CompilationConfig``. Its two modes are in ``modes.py``.

Module-level imports are the standard library, ``errors``, ``modes`` and ``settings`` only, so that
the table can be read without torch. The rule: settings are values, fixed at construction; results
of a compilation are never stored here.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from cgcompile.errors import ConfigError
from cgcompile.modes import TORCH_MODES, CompilationMode, CUDAGraphMode
from cgcompile.settings import (
    ENV_PREFIX,
    GRAPHS,
    PIECES,
    UNSET,
    enum_parser,
    one_of,
    optional,
    parse_bool,
    parse_compile_sizes,
    parse_compiler,
    parse_count,
    parse_endpoints,
    parse_mapping,
    parse_names,
    parse_ops,
    parse_passes,
    parse_sizes,
    parse_text,
    parsed,
    setting,
    sizes_meant,
)

_IGNORED = {  # why a setting would have no effect, and what to do
    PIECES: ("only mode PIECEWISE splits the graph and compiles pieces", "use mode PIECEWISE"),
    GRAPHS: ("nothing is captured", "set cudagraph_mode, for example to FULL"),
}


class _Origins(dict[str, tuple[str, Any]]):
    """The origin and the value of each setting."""


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

    "Pieces, passes and sizes" are ``compiler``, ``on_compile_error``, ``splitting``,
    ``splitting_ops``, ``builtin_splitting_ops``, ``graph_passes``, ``piece_passes``,
    ``disabled_passes``, ``cudagraph_capture_sizes``, ``compile_sizes``,
    ``compile_ranges_endpoints``, ``capture_dim`` and ``dump_passes``. Those of capture need a mode
    with CUDA graphs: ``capture_device``, ``strict``, ``on_input_change``, ``poison``, ``debug``,
    ``num_warmups``, ``max_captured_shapes`` and ``max_bindings``. One that would be ignored is an
    error. ``inductor_options`` need a mode and a compiler that use Inductor.

    Raises:
        ConfigError: unknown, malformed or impossible settings, with close matches.
    """

    mode: CompilationMode = setting(
        CompilationMode.PIECEWISE,
        enum_parser(CompilationMode),
        "How much is compiled, and in how many parts.",
    )
    cudagraph_mode: CUDAGraphMode | None = setting(
        None,
        optional(enum_parser(CUDAGraphMode)),
        "Which CUDA graphs serve a step. Unset: the first that the table above lists for mode.",
    )
    compiler: str | Callable[..., Any] = setting(
        "inductor",
        parse_compiler,
        "What compiles a piece: 'inductor', 'aot' (functorch's ATen graph, run op by op), 'eager', "
        "or a callable (gm, fake_inputs) -> callable.",
        needs=PIECES,
    )
    on_compile_error: str = setting(
        "raise",
        one_of("raise", "eager"),
        "Where a compiler raises: 'raise', with the piece and your line, or let the piece run "
        "'eager', uncompiled, counted in the record of the compilation.",
        needs=PIECES,
    )
    inductor_options: tuple[tuple[str, Any], ...] = setting(
        (),
        parse_mapping,
        "Settings of torch._inductor.config for the compiled code, as a mapping or JSON text.",
    )
    splitting: str = setting(
        "fx",
        one_of("fx", "breakable"),
        "'fx': the traced graph is cut at its boundaries. 'breakable': nothing is traced, capture "
        "breaks where a splitting op runs; needs cgcompile.compile().",
        needs=PIECES,
    )
    splitting_ops: tuple[Any, ...] = setting(
        (),
        parse_ops,
        "Boundaries beside the built-in ones: names, ops, functions or SplittingOp objects.",
        needs=PIECES,
    )
    builtin_splitting_ops: bool = setting(
        True,
        parse_bool,
        "Whether the built-in attention ops are boundaries.",
        needs=PIECES,
    )
    graph_passes: tuple[Any, ...] = setting(
        (),
        parse_passes,
        "Your passes over the whole graph, before it is split.",
        needs=PIECES,
    )
    piece_passes: tuple[Any, ...] = setting(
        (),
        parse_passes,
        "Your passes over each distinct captured piece, after the split.",
        needs=PIECES,
    )
    disabled_passes: tuple[str, ...] = setting(
        (),
        parse_names,
        "Passes to leave out, by name: yours, 'eliminate_noops', 'eliminate_clones'.",
        needs=PIECES,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None,
        optional(parse_sizes),
        "Sizes of the batch dimension that will be captured; each is checked against the guards.",
        needs=PIECES,
    )
    compile_sizes: tuple[int | str, ...] | None = setting(
        None,
        optional(parse_compile_sizes),
        "Sizes of the batch dimension for which each piece is compiled separately, for that "
        "size alone; the text 'cudagraph_capture_sizes' stands for all of that setting.",
        needs=PIECES,
    )
    compile_ranges_endpoints: tuple[int, ...] | None = setting(
        None,
        optional(parse_endpoints),
        "Where the batch dimension is cut into ranges that are compiled apart: 32, 512 for 1 to "
        "32, 33 to 512, and 513 and more. A size of compile_sizes beats its range.",
        needs=PIECES,
    )
    capture_dim: str | None = setting(
        None,
        optional(parse_text),
        "Which input dimension the sizes are of, such as 'x.size()[0]'; needed if several vary.",
        needs=PIECES,
    )
    dump_passes: str | None = setting(
        None,
        optional(parse_text),
        "A folder for the graph before and after every pass, as readable text.",
        needs=PIECES,
    )

    cache_dir: str | None = setting(
        None,
        optional(parse_text),
        "The folder that keeps compiled pieces for other processes, or 'off'. Unset: cgcompile in "
        "$XDG_CACHE_HOME, or in ~/.cache. It is loaded as code: you or root must own it, alone.",
    )
    capture_device: str = setting(
        "auto",
        one_of("auto", "host"),
        "'auto': CUDA graphs for CUDA tensors, nothing for CPU tensors. 'host': graphs of CPU "
        "tensors too, by a recorder with the rules of CUDA graphs, for tests and study; slow.",
        needs=GRAPHS,
    )
    strict: bool = setting(
        False,
        parse_bool,
        "Raise where a step would otherwise run without a graph and count a reason.",
        needs=GRAPHS,
    )
    on_input_change: str = setting(
        "raise",
        one_of("raise", "copy", "recapture", "eager"),
        "Under a forward context, if the address of an input or a number differs from capture: "
        "'raise', 'recapture' (bounded by max_captured_shapes) or run 'eager'. 'copy': inputs that "
        "are only read are copied, from any address; compiled models only.",
        needs=GRAPHS,
    )
    poison: bool = setting(
        False,
        parse_bool,
        "Fill the memory of graphs with NaN before each replay, so that stale reads show. Slow.",
        needs=GRAPHS,
    )
    debug: bool = setting(
        False,
        parse_bool,
        "Raise where a result is touched whose memory a later step has overwritten. Slow.",
        needs=GRAPHS,
    )
    num_warmups: int = setting(
        1,
        parse_count(0),
        "Calls of a new shape that run plain before one is captured.",
        needs=GRAPHS,
    )
    max_captured_shapes: int = setting(
        64,
        parse_count(0),
        "How many shapes are captured without a forward context, per graph and weight set.",
        needs=GRAPHS,
    )
    max_bindings: int = setting(
        128,
        parse_count(1),
        "Maximum number of weight sets (and mutated inputs) for which one graph is captured.",
        needs=GRAPHS,
    )

    # Origin and value by setting, which ``dataclasses.replace`` passes on. Not a field: it has no
    # part in equality and hashing.
    _origins: InitVar[_Origins | None] = None

    def __new__(cls, *args: Any, **settings: Any) -> "CompilationConfig":
        known = cls.names()
        for name, value in settings.items():
            if name not in known and not (name == "_origins" and isinstance(value, _Origins)):
                raise ConfigError.unknown_setting(name=name, where="arguments", known=known)
        return super().__new__(cls)

    def __post_init__(self, _origins: _Origins | None) -> None:
        self._refuse_unknown_environment()
        origins = {}
        for spec in dataclasses.fields(self):
            value, origin = self._parsed_with_origin(spec)
            object.__setattr__(self, spec.name, value)
            origins[spec.name] = origin
            if _origins is not None and _origins[spec.name][1] == value:
                origins[spec.name] = _origins[spec.name][0]
        for name, origin in origins.items():
            if origin == "environment" and self._drop(name):
                origins[name] = "default"
        self._refuse_ignored_settings()
        self._settle_cudagraph_mode()
        _ = self.sizes_to_compile  # raises where they cannot be
        self._keep_origins(origins)

    def _parsed_with_origin(self, spec: dataclasses.Field[Any]) -> tuple[Any, str]:
        """Return the value of an argument, else of the environment, else the default."""
        value, parse = getattr(self, spec.name), spec.metadata["parse"]
        if value is not UNSET:
            return parsed(spec.name, "CompilationConfig", value, parse), "argument"
        variable = ENV_PREFIX + spec.name.upper()
        if variable in os.environ:
            return parsed(spec.name, variable, os.environ[variable], parse), "environment"
        return spec.metadata["default"], "default"

    def _keep_origins(self, origins: Mapping[str, str]) -> None:
        pairs = {name: (origins[name], getattr(self, name)) for name in self.names()}
        object.__setattr__(self, "_origins", _Origins(pairs))

    @property
    def origins(self) -> dict[str, str]:
        """Where each setting comes from.

        ``argument``, ``options`` or ``mode`` of ``torch.compile``, ``environment``, ``default``.
        ``dataclasses.replace`` keeps the origin of unchanged settings.
        """
        return {name: origin for name, (origin, _) in self.__dict__["_origins"].items()}

    def _drop(self, name: str) -> bool:
        """Reset a setting of the environment, which is for all models, if this mode ignores it."""
        spec = next(spec for spec in dataclasses.fields(self) if spec.name == name)
        if name == "cudagraph_mode":
            ignored = self._needs_a_split(self.cudagraph_mode)
        elif name == "capture_dim":
            ignored = not self._has_sizes or self._ignores(spec)
        elif name == "inductor_options":
            ignored = not self._uses_inductor
        else:
            ignored = self._ignores(spec)
        if ignored:
            object.__setattr__(self, name, spec.metadata["default"])
        return ignored

    def _refuse_unknown_environment(self) -> None:
        known = [ENV_PREFIX + name.upper() for name in self.names()]
        for variable in sorted(os.environ):
            if variable.startswith(ENV_PREFIX) and variable not in known:
                raise ConfigError.unknown_setting(name=variable, where="environment", known=known)

    def _refuse_ignored_settings(self) -> None:
        if not self._has_sizes and self.capture_dim is not None:
            raise ConfigError.impossible(
                what=f"capture_dim = {self.capture_dim!r} without cudagraph_capture_sizes, "
                "compile_sizes or compile_ranges_endpoints",
                because="it says which dimension those sizes speak of",
                instead="Give the sizes, or leave capture_dim out; explain() takes both by "
                "themselves.",
            )
        if self.inductor_options and not self._uses_inductor:
            raise ConfigError.impossible(
                what=f"inductor_options with compiler {self.compiler!r} and mode {self.mode.name}",
                because="nothing there is compiled by Inductor",
                instead="Leave inductor_options out, or use compiler 'inductor'.",
            )
        for spec in dataclasses.fields(self):
            if self._ignores(spec) and getattr(self, spec.name) != spec.metadata["default"]:
                because, instead = _IGNORED[spec.metadata["needs"]]
                raise ConfigError.impossible(
                    what=f"{spec.name} = {getattr(self, spec.name)!r} with mode {self.mode.name}",
                    because=because,
                    instead=f"Leave {spec.name} out, or {instead}.",
                )

    @property
    def _has_sizes(self) -> bool:
        sizes = (self.cudagraph_capture_sizes, self.compile_sizes, self.compile_ranges_endpoints)
        return sizes != (None, None, None)

    @property
    def _uses_inductor(self) -> bool:
        return self.compiler == "inductor" and self.mode is not CompilationMode.NONE

    def _ignores(self, spec: dataclasses.Field[Any]) -> bool:
        """Return whether a setting has no effect in the mode."""
        if self.mode is CompilationMode.PIECEWISE:
            return False
        needs = spec.metadata["needs"]
        captures = self.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        return needs == PIECES or (needs == GRAPHS and not captures)

    def _needs_a_split(self, mode: CUDAGraphMode | None) -> bool:
        """Return whether a CUDA graph mode is impossible because the graph is not split."""
        split = self.mode is CompilationMode.PIECEWISE
        return mode is not None and mode.requires_piecewise_compilation() and not split

    @property
    def sizes_to_compile(self) -> tuple[int, ...]:
        """The sizes of ``compile_sizes``, in order, each once."""
        pads = self.cudagraph_mode is not CUDAGraphMode.NONE
        return sizes_meant(self.compile_sizes or (), self.cudagraph_capture_sizes, pads=pads)

    def _settle_cudagraph_mode(self) -> None:
        split = self.mode is CompilationMode.PIECEWISE
        if self.cudagraph_mode is None:
            settled = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.NONE
            object.__setattr__(self, "cudagraph_mode", settled)
        elif self._needs_a_split(self.cudagraph_mode):
            raise ConfigError.impossible(
                what=f"cudagraph_mode {self.cudagraph_mode.name} with mode {self.mode.name}",
                because="piecewise graphs need a split graph",
                instead="Use mode PIECEWISE, or one of the CUDA graph modes NONE, FULL, "
                "FULL_DECODE_ONLY.",
            )

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
        """
        if config is not None and not isinstance(config, cls):
            expected = "a CompilationConfig; give single settings by name"
            raise ConfigError.bad_value(
                name="config", where="Backend", value=config, expected=expected
            )
        if torch_mode is not None and not isinstance(torch_mode, str):
            raise ConfigError.bad_value(
                name="mode", where="torch.compile", value=torch_mode, expected="a text or None"
            )
        for name, settings in (("options", options), ("arguments", arguments)):
            if settings is not None and not isinstance(settings, Mapping):
                raise ConfigError.no_mapping(
                    name=name, value=settings, is_config=isinstance(settings, cls)
                )
        if torch_mode is not None and torch_mode not in TORCH_MODES:
            raise ConfigError.unknown_torch_mode(mode=torch_mode, known=tuple(TORCH_MODES))
        changes: dict[str, Any] = dict(TORCH_MODES[torch_mode or "default"])
        for where, settings in (("options", options or {}), ("arguments", arguments or {})):
            for name, value in settings.items():
                changes[name] = cls._parse_setting(name, where, value)
        resolved = dataclasses.replace(config, **changes) if config is not None else cls(**changes)
        origins = resolved.origins | dict.fromkeys(TORCH_MODES[torch_mode or "default"], "mode")
        origins |= dict.fromkeys(options or {}, "options")
        resolved._keep_origins(origins | dict.fromkeys(arguments or {}, "argument"))
        return resolved

    @classmethod
    def _parse_setting(cls, name: str, where: str, value: Any) -> Any:
        if name not in cls.names():
            raise ConfigError.unknown_setting(name=str(name), where=where, known=cls.names())
        spec = next(spec for spec in dataclasses.fields(cls) if spec.name == name)
        return parsed(name, where, value, spec.metadata["parse"])
