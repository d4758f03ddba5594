"""What a model implements so that its encoder runs on graphs: :class:`SupportsEncoderCudaGraph`.

Names and defaults are those that engine authors know. Six methods are mandatory; the others have
defaults, which a model gets by inheriting or from :class:`CheckedModel`.
:class:`~cgcompile.encoder.PatchEncoder` implements all of them for the common layout. With one path
and no capture axes, methods are called without ``path=`` and ``axes=``.

The rule for models: the forward that a graph records reads its buffers alone.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch

from cgcompile.encoder.errors import EncoderError
from cgcompile.errors import ConfigError
from cgcompile.settings import (
    Moved,
    is_whole,
    require,
    require_fields,
    require_items,
    require_kind,
    takes_earlier,
    warn_of_earlier,
    whole,
)
from cgcompile.torch_compat import torch_ops

DEFAULT, GLOBAL, LOCAL = "default", "global", "local"  # paths
VIDEO = "video"
KEEP, ZERO = "keep", "zero"
PATCHES, TOKENS = "patches", "tokens"  # units of the rows of buffers
ZEROS, OFFSETS = "zeros", "offsets"  # contents of padding rows

EncoderCudaGraphPaddingLogic: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""``logic(dst, src)``: write all of the captured buffer ``dst`` from the rows ``src`` of a replay.

It runs before each replay, in place of zeroing and copying; ``dst`` keeps its shape and address,
and still holds what the last replay left.
"""

_TOKENS = {
    DEFAULT: "output_tokens",
    GLOBAL: "global_output_tokens",
    LOCAL: "local_output_tokens",
}


_COUNTS = ("input_size", *_TOKENS.values(), "frames")


def _item_number(name: str, value: Any) -> int:
    if not is_whole(value, 0):
        raise EncoderError.item_number(name=name, found=value)
    return int(value)


@dataclass
class EncoderItemSpec:
    """One image, video or other item of a call. Checked when made and when a manager reads it.

    Attributes:
        input_size: rows of the flattened input, patches before merging. Ranks share work by it.
        output_tokens: rows of the result. Budgets are counted in them, if there is one path.
        global_output_tokens: those of the path ``"global"``, with ``enable_dual_path_graph``.
        local_output_tokens: those of the path ``"local"``; 0 skips its graph.
        path_output_tokens: by path, where the configuration names paths of its own.
        frames: sequences of attention, such as the frames of a video; limited by
            ``max_frames_per_batch``.
        axes: by capture axis the value that this item needs at least.

    Raises:
        EncoderError: a number is not whole, or below 0.

    Example:
        >>> spec = cgcompile.encoder.EncoderItemSpec(input_size=64, output_tokens=16)
        >>> spec.frames
        1
    """

    input_size: int
    output_tokens: int
    global_output_tokens: int = 0
    local_output_tokens: int = 0
    path_output_tokens: Mapping[str, int] = field(default_factory=dict)
    frames: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Twice for each item of a call, so it calls nothing for usual values.
        for name in _COUNTS:
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number < 1 << 63:
                setattr(self, name, _item_number(name, number))
        for name in ("path_output_tokens", "axes"):
            numbers = getattr(self, name)
            if type(numbers) is dict and not numbers:
                continue
            require_kind(name, "EncoderItemSpec", numbers, Mapping)
            setattr(self, name, {key: _item_number(key, number) for key, number in numbers.items()})

    def tokens(self, path: str = DEFAULT) -> int:
        """Return the number of output rows on a path; 0 if the item does not take it."""
        if type(path) is not str:
            require_kind("path", "EncoderItemSpec.tokens", path, str)
        if self.path_output_tokens:
            return self.path_output_tokens.get(path, 0)
        tokens: int = getattr(self, _TOKENS[path]) if path in _TOKENS else 0
        return tokens


@dataclass(frozen=True)
class EncoderCudaGraphPathConfig:
    """One set of graphs of an encoder that has several.

    Attributes:
        min_token_budget: the smallest inferred budget, in output tokens; None: the least of
            :meth:`~cgcompile.encoder.SupportsEncoderCudaGraph.get_encoder_cudagraph_budget_range`.
        axes: further sizes that each graph is captured for, such as the longest sequence: names, as
            items and the model call them, and the captured whole numbers. A group of items takes
            the smallest value that suffices for each of them; without one it runs eager.

    Example:
        >>> config = cgcompile.encoder.EncoderCudaGraphConfig(
        ...     modalities=["image"],
        ...     buffer_keys=["pixel_values"],
        ...     out_hidden_size=32,
        ...     paths={
        ...         "global": cgcompile.encoder.EncoderCudaGraphPathConfig(min_token_budget=16),
        ...         "local": cgcompile.encoder.EncoderCudaGraphPathConfig(axes={"longest": (4, 8)}),
        ...     },
        ... )
        >>> config.paths["local"].axes
        {'longest': (4, 8)}
    """

    min_token_budget: int | None = None
    axes: Mapping[str, Sequence[int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        least = self.min_token_budget
        valid = least is None or is_whole(least, 1)
        where = "EncoderCudaGraphPathConfig"
        require(valid, "min_token_budget", where, least, "at least 1, or None")
        require_kind("axes", where, self.axes, Mapping)
        axes = {name: _axis_values(name, values) for name, values in self.axes.items()}
        object.__setattr__(self, "min_token_budget", whole(least))
        object.__setattr__(self, "axes", axes)


def _axis_values(name: str, values: Any) -> tuple[int, ...]:
    """Return the captured values of an axis, ascending."""
    where = f"axis {name!r} of an encoder"
    require_items("values", where, values)
    values = tuple(values)
    valid = bool(values) and all(is_whole(value, 0) for value in values)
    require(valid, "values", where, values, "at least one whole number")
    return tuple(sorted(set(map(int, values))))


@dataclass(frozen=True)
class EncoderCaptureAxis:
    """An earlier form of ``axes`` of a path."""

    name: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        require_fields(self, but=("values",))
        object.__setattr__(self, "values", _axis_values(self.name, self.values))


@dataclass(frozen=True)
class EncoderBuffer:
    """How the buffer of a key is filled at a replay, and what its rows count.

    Attributes:
        rows: what the rows of a replay buffer count, or the last entry of offsets: ``"patches"``
            (``input_size``) or ``"tokens"`` of its items. Other numbers are refused before anything
            runs; None: they are not compared, and padding hides rows that are missing.
        tail: contents of padding rows: ``"zeros"``; ``"offsets"``: the buffer has offsets
            (``cu_seqlens``, one dimension, rising), and entries behind the real ones go on to the
            last entry that the buffer had at capture, so that padded rows are one real sequence at
            the end (attention that leaves rows unwritten leaves there what the memory pool held,
            and that may be NaN); or a function, see :data:`EncoderCudaGraphPaddingLogic`.
        longest_padding: of offsets, the most rows of a sequence of padding rows; None: no limit.
        rows_per_token: rows of the input (``input_size``) that the buffer has room for, for each
            output token; an item with more of them takes the room of more tokens. 0: the input
            always fits. Of a buffer that counts ``"tokens"`` it has no effect.
        on_none: what a ``None`` in the replay buffers does: ``"keep"`` or ``"zero"``.

    Raises:
        ConfigError: a value is not valid.

    Example:
        >>> starts = cgcompile.encoder.EncoderBuffer("patches", "offsets", longest_padding=64)
        >>> config = cgcompile.encoder.EncoderCudaGraphConfig(
        ...     modalities=["image"],
        ...     buffer_keys=["pixel_values", "cu_seqlens"],
        ...     out_hidden_size=32,
        ...     padding_logics={"cu_seqlens": starts},
        ... )
        >>> config.longest_padding
        {'cu_seqlens': 64}
    """

    rows: str | None = None
    tail: str | EncoderCudaGraphPaddingLogic = ZEROS
    longest_padding: int | None = None
    rows_per_token: int = 0
    on_none: str = KEEP

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, expected: str) -> None:
            require(holds, name, "EncoderBuffer", getattr(self, name), expected)

        longest, units = self.longest_padding, (None, PATCHES, TOKENS)
        check("rows", self.rows in units, "'patches', 'tokens' or None")
        tail = callable(self.tail) or self.tail in (ZEROS, OFFSETS)
        check("tail", tail, "'zeros', 'offsets' or a function")
        check("longest_padding", longest is None or is_whole(longest, 1), "at least 1, or None")
        check("longest_padding", longest is None or self.tail == OFFSETS, "None without offsets")
        check("rows_per_token", is_whole(self.rows_per_token, 0), "a whole number of at least 0")
        check("on_none", self.on_none in (KEEP, ZERO), "'keep' or 'zero'")
        object.__setattr__(self, "longest_padding", whole(longest))
        object.__setattr__(self, "rows_per_token", int(self.rows_per_token))


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """The encoder of a model. Copied by the manager, so fixed for its lifetime.

    Attributes:
        modalities: the kinds of its inputs, such as ``["image", "video"]``.
        buffer_keys: the tensors that graphs read; exactly these are written before each replay.
        out_hidden_size: columns H of the result [tokens, H]; of several tensors, those of at least
            one. The manager compares it with the result of the forward.
        padding_logics: by key, how a buffer is filled: a function that writes it, in place of
            zeroing its tail and copying, or an :class:`EncoderBuffer`.
        max_frames_per_video: frames of the longest video; used only with ``"video"`` among the
            modalities. 0, no videos: room for one frame per item, whatever limit a user gives.
        enable_dual_path_graph: two sets of graphs, ``"global"`` and ``"local"``.
        global_token_per_image: output tokens of one global image; the least budget of its path.
        local_token_per_patch: output tokens of one local patch; the least budget of its path.
        paths: several sets of graphs by name; left out: ``"default"``, or the two of dual path. See
            :attr:`graph_sets`.
    Raises:
        ConfigError: fields contradict each other, or a value is not valid.

    Example:
        >>> config = cgcompile.encoder.EncoderCudaGraphConfig(
        ...     modalities=["image"], buffer_keys=["pixel_values"], out_hidden_size=32
        ... )
        >>> config.max_frames_per_video
        1
    """

    modalities: Sequence[str]
    buffer_keys: Sequence[str]
    out_hidden_size: int
    padding_logics: Mapping[str, EncoderCudaGraphPaddingLogic | EncoderBuffer] = field(
        default_factory=dict
    )
    max_frames_per_video: int = 1
    enable_dual_path_graph: bool = False
    global_token_per_image: int = 0
    local_token_per_patch: int = 0
    paths: Mapping[str, EncoderCudaGraphPathConfig] = field(default_factory=dict)
    buffers: dict[str, EncoderBuffer] = field(init=False, repr=False, compare=False)
    graph_sets: dict[str, EncoderCudaGraphPathConfig] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_fields(self, but=("modalities", "buffer_keys", "buffers", "graph_sets"))
        settled: dict[str, Any] = {}
        for name in ("modalities", "buffer_keys"):
            names = getattr(self, name)
            require_items(name, _WHERE, names, str)
            unique = bool(names) and len(set(names)) == len(names)
            _require(unique, name, names, "at least one name, each once")
            settled[name] = list(names)
        for name, least in _LEAST.items():
            number = getattr(self, name)
            _require(is_whole(number, least), name, number, f"a whole number of at least {least}")
            settled[name] = int(number)
        rules = dict(self.padding_logics)
        for key in rules:
            expected = f"names among buffer_keys ({', '.join(self.buffer_keys)})"
            _require(key in self.buffer_keys, "padding_logics", key, expected)
        buffers = {key: rules.get(key, _PLAIN) for key in settled["buffer_keys"]}
        settled["buffers"] = {key: _rule(rule) for key, rule in buffers.items()}
        settled.update(padding_logics=rules, paths=dict(self.paths), graph_sets=_graph_sets(self))
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        _check_paths(self)

    def __getattr__(self, name: str) -> Any:
        """Return the value of an earlier field."""
        if name not in _EARLIER or "buffers" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_of_earlier(f"field {name} is deprecated: {_EARLIER[name][0]}")
        return _earlier_value(self, name)

    @property
    def longest_padding(self) -> dict[str, int | None]:
        """Offset key -> most rows of a padding sequence; None: one sequence for all padding."""
        return {k: rule.longest_padding for k, rule in self.buffers.items() if rule.tail == OFFSETS}

    @property
    def most_frames_of_an_item(self) -> int:
        """``max_frames_per_video`` of a model of videos; at most 1 of any other."""
        frames = self.max_frames_per_video
        return frames if VIDEO in self.modalities else min(frames, 1)


_WHERE = "EncoderCudaGraphConfig"
_PLAIN = EncoderBuffer()


def _rule(rule: Any) -> EncoderBuffer:
    return rule if isinstance(rule, EncoderBuffer) else EncoderBuffer(tail=rule)


_LEAST = {
    "out_hidden_size": 1,
    "max_frames_per_video": 0,
    "global_token_per_image": 0,
    "local_token_per_patch": 0,
}


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    require(holds, name, _WHERE, value, expected)


def _graph_sets(config: EncoderCudaGraphConfig) -> dict[str, EncoderCudaGraphPathConfig]:
    if config.paths:
        return dict(config.paths)
    if not config.enable_dual_path_graph:
        return {DEFAULT: EncoderCudaGraphPathConfig()}
    return {
        GLOBAL: EncoderCudaGraphPathConfig(config.global_token_per_image or None),
        LOCAL: EncoderCudaGraphPathConfig(config.local_token_per_patch or None),
    }


def _check_paths(config: EncoderCudaGraphConfig) -> None:
    """Refuse fields of paths that contradict each other, or the rules of buffers."""
    dual = config.enable_dual_path_graph
    for name in ("global_token_per_image", "local_token_per_patch"):
        if getattr(config, name) and not dual:
            raise ConfigError.impossible(
                what=f"EncoderCudaGraphConfig({name}={getattr(config, name)})",
                because="it is used with enable_dual_path_graph=True alone",
                instead="Set that too, or leave this out.",
            )
    if dual and config.paths and set(config.paths) != {GLOBAL, LOCAL}:
        raise ConfigError.impossible(
            what=f"enable_dual_path_graph with paths {sorted(config.paths)}",
            because="dual path means the paths 'global' and 'local'",
            instead="Say one of the two.",
        )
    for key, rule in config.buffers.items() if len(config.graph_sets) > 1 else ():
        for name in ("rows", "rows_per_token"):
            value = getattr(rule, name)
            if value and value != TOKENS:
                raise ConfigError.impossible(
                    what=f"{name}={value!r} of buffer {key!r} with several paths",
                    because="each has an input of its own",
                    instead="Leave it out, or count 'tokens' as rows.",
                )


# ---------------------------------------------------------------- earlier fields


def _move_rules(field_name: str) -> Moved:
    """Return what moves an earlier field, a value by key, into the rules of buffers."""

    def move(arguments: dict[str, Any], values: Any) -> None:
        if field_name == "tail":  # offset_keys: names, or most rows of padding sequences by name
            if not isinstance(values, Mapping):
                require_items("offset_keys", _WHERE, values)
                values = dict.fromkeys(values)
            _set_rules(arguments, "longest_padding", values, tail=OFFSETS)
        else:
            _set_rules(arguments, field_name, values)

    return move


def _set_rules(arguments: dict[str, Any], name: str, values: Any, **more: Any) -> None:
    logics = arguments.get("padding_logics", {})
    for argument, value in (("padding_logics", logics), (name, values)):
        require_kind(argument, _WHERE, value, Mapping)
    rules = {key: _rule(rule) for key, rule in logics.items()}
    for key, value in values.items():
        rule = rules.get(key, _PLAIN)
        if more and callable(rule.tail):
            raise two_tails(key)
        rules[key] = replace(rule, **{name: value}, **more)
    arguments["padding_logics"] = rules


def two_tails(key: str) -> ConfigError:
    """Return what to raise for a function that pads a buffer with offsets."""
    return ConfigError.impossible(
        what=f"a padding logic for {key!r}, which is among offset_keys too,",
        because="both set what the tail holds",
        instead="Keep one.",
    )


def _move_rows_per_token(arguments: dict[str, Any], rows: Any) -> None:
    """Set the rows of the first buffer that may have those of the input; others have the same."""
    rules = arguments.get("padding_logics", {})
    keys = [key for key in arguments.get("buffer_keys", ()) if _rows_of(rules, key) != TOKENS]
    if rows and keys:
        _set_rules(arguments, "rows_per_token", {keys[0]: rows})


def _rows_of(rules: Any, key: str) -> str | None:
    return _rule(rules[key]).rows if isinstance(rules, Mapping) and key in rules else None


def _move_axes(arguments: dict[str, Any], axes: Any) -> None:
    require_items("capture_axes", _WHERE, axes)
    axes = tuple(axes)  # of a generator, too
    require_items("capture_axes", _WHERE, axes, EncoderCaptureAxis)
    named = {axis.name: axis.values for axis in axes}
    names = ("global_token_per_image", "local_token_per_patch")
    least = [arguments.get(name) or None for name in names]
    paths = arguments.get("paths")
    if not paths and arguments.get("enable_dual_path_graph"):
        paths = dict(zip((GLOBAL, LOCAL), map(EncoderCudaGraphPathConfig, least), strict=True))
    paths = paths or {DEFAULT: EncoderCudaGraphPathConfig()}
    if named:
        arguments["paths"] = {path: replace(spec, axes=named) for path, spec in paths.items()}


def _earlier_value(config: EncoderCudaGraphConfig, name: str) -> Any:
    rules = config.buffers.items()
    if name == "offset_keys":
        return config.longest_padding
    if name == "on_none":
        return {key: rule.on_none for key, rule in rules if rule.on_none != KEEP}
    if name == "buffer_rows":
        return {key: rule.rows for key, rule in rules if rule.rows is not None}
    if name == "input_rows_per_token":
        return max(rule.rows_per_token for _, rule in rules)
    axes = next(iter(config.graph_sets.values())).axes
    return tuple(EncoderCaptureAxis(name, tuple(values)) for name, values in axes.items())


_EARLIER: dict[str, tuple[str, Any, Moved]] = {
    "capture_axes": ("use axes of an EncoderCudaGraphPathConfig", (), _move_axes),
    "offset_keys": ("use EncoderBuffer(tail='offsets')", (), _move_rules("tail")),
    "on_none": ("use EncoderBuffer(on_none=...)", None, _move_rules("on_none")),
    "buffer_rows": ("use EncoderBuffer(rows=...)", None, _move_rules("rows")),
    "input_rows_per_token": ("use EncoderBuffer(rows_per_token=...)", 0, _move_rows_per_token),
}
EncoderCudaGraphConfig.__init__ = takes_earlier(**_EARLIER)(EncoderCudaGraphConfig.__init__)  # type: ignore[method-assign]


@dataclass
class EncoderCudaGraphCaptureInputs:
    """The buffers of one graph.

    Attributes:
        values: by key of ``buffer_keys``. The manager keeps these very tensors, writes into them
            before each replay, and passes them to the forward that is recorded.

    Example:
        >>> buffers = {"pixel_values": torch.zeros(64, 12)}
        >>> inputs = cgcompile.encoder.EncoderCudaGraphCaptureInputs(buffers)
        >>> list(inputs.values)
        ['pixel_values']
    """

    values: dict[str, torch.Tensor]


@dataclass
class EncoderCudaGraphReplayBuffers:
    """The values of a group of items for the buffers of a graph.

    Attributes:
        values: by key of ``buffer_keys``: rows, at most as many as the buffer has; ``None`` leaves
            the buffer as the last replay left it, unless ``on_none`` of its
            :class:`EncoderBuffer` requests zeros.

    Example:
        >>> values = {"pixel_values": torch.zeros(24, 12), "places": None}
        >>> buffers = cgcompile.encoder.EncoderCudaGraphReplayBuffers(values)
        >>> buffers.values["places"] is None  # this buffer keeps what it has
        True
    """

    values: dict[str, torch.Tensor | None]


MANDATORY = (
    "get_encoder_cudagraph_config",
    "get_encoder_cudagraph_item_specs",
    "select_encoder_cudagraph_items",
    "prepare_encoder_cudagraph_capture_inputs",
    "prepare_encoder_cudagraph_replay_buffers",
    "encoder_cudagraph_forward",
)
OPTIONAL = (
    "get_encoder_cudagraph_budget_range",
    "get_input_modality",
    "encoder_eager_forward",
    "postprocess_encoder_output",
)
# Of an older protocol: get_encoder_cudagraph_item_specs replaces them.
_OLDER = (
    "get_encoder_cudagraph_num_items",
    "get_encoder_cudagraph_per_item_output_tokens",
    "get_encoder_cudagraph_per_item_input_sizes",
)
# Methods that take path= where there are several paths; True: and axes=.
_BY_PATH = {
    "prepare_encoder_cudagraph_capture_inputs": True,
    "prepare_encoder_cudagraph_replay_buffers": True,
    "encoder_cudagraph_forward": True,
    "encoder_eager_forward": False,
}


def _missing(model: object, method: str) -> EncoderError:
    return EncoderError.no_method(model=type(model).__name__, method=method)


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """A model whose encoder can run on graphs of fixed budgets.

    ``mm_kwargs`` is one call: the keyword arguments of one modality, for any number of items. The
    first six methods are mandatory. The manager copies results out of the memory of graphs.

    Example:
        >>> isinstance(nn.Linear(2, 2), cgcompile.encoder.SupportsEncoderCudaGraph)
        False
    """

    supports_encoder_cudagraph: ClassVar[bool] = True

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Return the inputs and buffers of the encoder. Called once by a manager."""
        raise _missing(self, "get_encoder_cudagraph_config")

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Return one description for each item of a call, in order. Called once per call.

        It may read sizes from the device, which synchronises; grids on the CPU do not.
        """
        raise _missing(self, "get_encoder_cudagraph_item_specs")

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """Return the call with only these items, in this order; ``[]`` must be accepted."""
        raise _missing(self, "select_encoder_cudagraph_items")

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Return buffers for one graph, with contents that the forward can run on.

        Args:
            token_budget: rows B of the result.
            max_batch_size: most items of one replay.
            max_frames_per_batch: most frames of one replay: room for that many sequences, and, for
                offsets, for one more of padding.
            device: where the buffers are allocated.
            dtype: of floating point buffers.
            path: the set of graphs.
            axes: by capture axis the captured value.

        Returns:
            Tensors that the manager owns from now on, one for each of ``buffer_keys``.
        """
        raise _missing(self, "prepare_encoder_cudagraph_capture_inputs")

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> EncoderCudaGraphReplayBuffers:
        """Return the buffer values of these items: only real rows, on the device or the CPU."""
        raise _missing(self, "prepare_encoder_cudagraph_replay_buffers")

    def encoder_cudagraph_forward(
        self,
        inputs: dict[str, torch.Tensor],
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> Any:
        """Compute [B, H] from the buffers, or tensors [B, ...] in dicts and tuples; recorded.

        ``inputs`` is a dictionary of its own, which may be changed. Host values that the forward
        reads, such as a longest sequence, are baked in: take the largest that the budget allows.
        """
        raise _missing(self, "encoder_cudagraph_forward")

    # ------------------------------------------------------- with defaults

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], *, path: str = DEFAULT) -> Any:
        """Compute the same tensors of these items without a graph: [output tokens, ...].

        Default: the forward that graphs record, on replay buffers as they are, without padding.

        Raises:
            EncoderError: a replay buffer is None.
        """
        specs = self.get_encoder_cudagraph_item_specs(mm_kwargs)
        return unpadded_forward(self, self.get_encoder_cudagraph_config(), path, mm_kwargs, specs)

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        """Return (least, most) output tokens of a call that is worth a graph.

        ``settings`` is the value that the manager was given under that name. Called unless token
        budgets and ``max_batch_size`` are both given; needed only where token budgets are not.
        """
        raise EncoderError.no_range(model=type(self).__name__)

    def get_input_modality(self, mm_kwargs: Mapping[str, Any]) -> str:
        """Return the modality of a call. Default: the one that its keys name.

        A model of one modality always has that one. ``pixel_values`` alone are images.

        Raises:
            EncoderError: the keys name none of the modalities, or several.
        """
        known = list(self.get_encoder_cudagraph_config().modalities)
        if len(known) == 1:
            return known[0]
        keys = {key for key, value in mm_kwargs.items() if value is not None}
        names = " ".join(["image" if key == "pixel_values" else str(key) for key in keys])
        matching = [modality for modality in known if modality in names]
        if len(matching) != 1:
            raise EncoderError.modality(keys=sorted(keys), found=matching, known=known)
        return matching[0]

    def postprocess_encoder_output(
        self,
        output: Any,
        indices: list[int],
        per_item_out_tokens: Any,
        dest: dict[int, Any],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Give each item its part of a result: ``dest[index] = ...``.

        Default: consecutive rows, as views; those of several paths one after the other.

        Args:
            output: [output tokens, ...], the rows of the items one after the other, in the order
                of ``indices``. Several paths: a dictionary by path; one without tokens is left out,
                except for items without tokens on any path: these come together, with all paths.
                Memory of this call's own: views of it stay valid.
            indices: positions of the items in the call.
            per_item_out_tokens: output tokens of each item; several paths: a dictionary of lists.
            dest: receives the results.
            clone: copy the rows; a manager passes False.
            batch_mm_kwargs: the call with these items alone.
        """
        parts = output if isinstance(per_item_out_tokens, Mapping) else {DEFAULT: output}
        counts = per_item_out_tokens
        if not isinstance(counts, Mapping):
            counts = {DEFAULT: counts}
        by_path = [_split_rows(tree, counts[path]) for path, tree in parts.items()]
        for index, *trees in zip(indices, *by_path, strict=True):
            joined = _joined_rows(trees)
            dest[index] = torch_ops.tree_map(torch.clone, joined) if clone else joined


def _split_rows(tree: Any, counts: Sequence[int]) -> list[Any]:
    """Split the result of several items, [sum of counts, ...], into one view per item."""
    total = sum(counts)
    if isinstance(tree, torch.Tensor):
        return list(torch.split(tree[:total], list(counts)))
    leaves, spec = torch_ops.tree_leaves(tree), torch_ops.tree_spec(tree)
    parts = [torch.split(leaf[:total], list(counts)) for leaf in leaves]
    return [torch_ops.tree_unflatten(list(mine), spec) for mine in zip(*parts, strict=True)]


def _joined_rows(trees: Sequence[Any]) -> Any:
    """Concatenate results along the rows; a single one is returned without a copy."""
    kept = [tree for tree in trees if any(len(leaf) for leaf in torch_ops.tree_leaves(tree))]
    if len(kept) < 2:
        return [*kept, *trees][0]
    columns = zip(*map(torch_ops.tree_leaves, kept), strict=True)
    spec = torch_ops.tree_spec(kept[0])
    return torch_ops.tree_unflatten([torch.cat(column) for column in columns], spec)


# ---------------------------------------------------------------- what managers check and call


def check_rows(
    tree: Any, least: int, columns: int | None, method: str, exactly: bool = False
) -> None:
    """Raise unless all tensors of a result have enough rows, and one has ``columns`` columns."""
    leaves = torch_ops.tree_leaves(tree)
    for leaf in leaves or [None]:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        if fits and (len(leaf) == least if exactly else len(leaf) >= least):
            continue
        shape = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        count = "" if exactly else "at least "
        expected = f"tensors of {count}{least} rows each, the output tokens"
        many, few = sorted((len(leaf), least))[::-1] if fits else (1, 0)
        if few and many % few == 0:
            ratio = f"{many // few} times too {'many' if len(leaf) == many else 'few'}"
            raise EncoderError.row_ratio(
                method=method, found=str(shape), expected=expected, ratio=ratio
            )
        raise EncoderError.returned(call=f"{method}()", found=str(shape), expected=expected)
    if columns is not None:
        check_columns(leaves, columns, method)


def check_columns(leaves: Sequence[Any], columns: int, method: str) -> None:
    """Raise unless one tensor of a result has ``columns`` columns."""
    sizes = [leaf.shape[-1] if leaf.dim() > 1 else 1 for leaf in leaves]
    if columns not in sizes:
        raise EncoderError.columns(method=method, found=dict.fromkeys(sizes), expected=columns)


_REPLAY = "prepare_encoder_cudagraph_replay_buffers()"


def check_keys(values: Mapping[str, object], config: EncoderCudaGraphConfig, where: str) -> None:
    """Raise unless the keys are exactly the configured ones."""
    for key in values:
        if key not in config.buffer_keys:
            raise EncoderError.unknown_buffer(where=where, key=key, known=config.buffer_keys)
    for key in config.buffer_keys:
        if key not in values:
            raise EncoderError.no_value(where=where, key=key, known=sorted(values))


def row_counts(specs: Sequence[EncoderItemSpec], path: str) -> dict[str, int]:
    """Return the patches and the tokens of items on a path."""
    return {
        PATCHES: sum([spec.input_size for spec in specs]),
        TOKENS: sum([spec.tokens(path) for spec in specs]),
    }


def check_row_count(
    key: str,
    value: torch.Tensor,
    config: EncoderCudaGraphConfig,
    counts: Mapping[str, int],
    items: int,
    synchronises: bool,
) -> None:
    """Raise unless a value has the rows of its items, if these are known; check offsets."""
    rule = config.buffers[key]
    rows = None if rule.rows is None else counts[rule.rows]
    if rule.tail == OFFSETS:
        check_offsets(key, value, rows, synchronises)
    elif rows is not None and (not value.dim() or len(value) != rows):
        raise EncoderError.buffer_rows(
            key=key, found=layout(value), expected=rows, unit=str(rule.rows), items=items
        )


def check_values(
    values: Mapping[str, Any],
    config: EncoderCudaGraphConfig,
    specs: Sequence[EncoderItemSpec],
    path: str,
    synchronises: bool = False,
) -> None:
    """Raise unless replay buffers have the rows of their items, and offsets are cumulative.

    Contents of offsets on a device are read only if that may synchronise.
    """
    check_keys(values, config, _REPLAY)
    counts = row_counts(specs, path)
    for key, value in values.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise EncoderError.buffer_value(key=key, found=kind, expected="a tensor, or None")
        check_row_count(key, value, config, counts, len(specs), synchronises)


def check_offsets(key: str, value: torch.Tensor, rows: int | None, synchronises: bool) -> None:
    """Raise unless offsets rise from 0, to ``rows`` if that is known."""
    if value.dim() != 1 or value.is_floating_point():
        raise _not_offsets(key, layout(value), rows)
    if value.device.type != "cpu" and not synchronises:
        return
    if not len(value):
        if rows:
            raise _not_offsets(key, "empty", rows)
        return
    first, last = int(value[0]), int(value[-1])
    if first:
        raise _not_offsets(key, f"{first} at first", rows)
    if (value[1:] < value[:-1]).any():
        raise _not_offsets(key, "decreasing", rows)
    if rows is not None and last != rows:
        raise _not_offsets(key, f"{last} at last", rows)


def _not_offsets(key: str, text: str, rows: int | None) -> EncoderError:
    end = "the number of rows" if rows is None else f"{rows}, the rows of these items"
    return EncoderError.offsets(key=key, found=text, expected=f"integers from 0 to {end}")


def layout(value: torch.Tensor) -> str:
    """Return the shape and dtype of a tensor as text."""
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def check_cast(key: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise where a copy into a buffer would cast integers to floating point: it rounds them."""
    integral = not (value.is_floating_point() or value.is_complex())
    if integral and value.dtype != torch.bool and (dtype.is_floating_point or dtype.is_complex):
        # uint8 is what image loaders return, indices are of wider integers.
        text = layout(value)
        if value.dtype == torch.uint8:
            raise EncoderError.buffer_bytes(key=key, found=text, dtype=str(dtype))
        raise EncoderError.buffer_cast(key=key, found=text, dtype=str(dtype))


def path_arguments(
    config: EncoderCudaGraphConfig, path: str, axes: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments ``path`` and ``axes`` that methods of the model take."""
    named: dict[str, Any] = {}
    if config.enable_dual_path_graph or list(config.paths) not in ([], [DEFAULT]):
        named["path"] = path
    names = config.graph_sets[path].axes
    if names and axes is not None:
        named["axes"] = dict(zip(names, axes, strict=True))
    return named


def unpadded_forward(
    model: Any,
    config: EncoderCudaGraphConfig,
    path: str,
    mm_kwargs: dict[str, Any],
    specs: Sequence[EncoderItemSpec],
    convert: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Run the forward that graphs record on replay buffers, converted by key, without padding."""
    axes = config.graph_sets[path].axes
    needed = [max((spec.axes.get(name, 0) for spec in specs), default=0) for name in axes]
    named = path_arguments(config, path, needed)
    frames = sum(spec.frames for spec in specs)
    values = model.prepare_encoder_cudagraph_replay_buffers(
        mm_kwargs, len(specs), frames, **named
    ).values
    check_values(values, config, specs, path)
    inputs: dict[str, torch.Tensor] = {}
    for key in config.buffer_keys:
        if values[key] is None:
            raise EncoderError.nothing_to_run_on(key=key)
        inputs[key] = values[key] if convert is None else convert(key, values[key])
    with named_buffers(config.buffer_keys):
        return model.encoder_cudagraph_forward(inputs, **named)


@contextmanager
def named_buffers(keys: Collection[str]) -> Iterator[None]:
    """Name the buffers where a forward reads a key that is not among them."""
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or key in keys:
            raise
        raise EncoderError.no_buffer(key=key, known=list(keys)) from error


def _is_own(model: object, name: str) -> bool:
    """Return whether a model implements a method itself, on its class or on the object."""
    method = getattr(model, name, None)
    default = getattr(SupportsEncoderCudaGraph, name)
    return callable(method) and getattr(method, "__func__", method) is not default


def supports_encoder_cudagraph(model: object) -> bool:
    """Return whether a manager takes the model: it implements the mandatory methods.

    Example:
        >>> cgcompile.encoder.supports_encoder_cudagraph(nn.Linear(2, 2))
        False
    """
    return all(_is_own(model, name) for name in MANDATORY)


def _takes(method: Any, keyword: str) -> bool:
    """Return whether a method can be called with a keyword; True if its signature is unknown."""
    try:
        known = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return True
    kinds = {parameter.kind for parameter in known.values()}
    named = known[keyword].kind if keyword in known else None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return named in by_name or inspect.Parameter.VAR_KEYWORD in kinds


class CheckedModel:
    """The protocol methods of one model: its own, or the defaults."""

    def __init__(self, model: Any) -> None:
        self.model = model
        if not _is_own(model, "get_encoder_cudagraph_item_specs"):
            older = [name for name in _OLDER if callable(getattr(model, name, None))]
            if older:
                raise EncoderError.older_protocol(model=type(model).__name__, found=older)
        for method in MANDATORY:
            if not _is_own(model, method):
                raise _missing(model, method)
        config = model.get_encoder_cudagraph_config()
        if not isinstance(config, EncoderCudaGraphConfig):
            raise EncoderError.returned(
                call="get_encoder_cudagraph_config()",
                found=type(config).__name__,
                expected="an EncoderCudaGraphConfig",
            )
        self.config = replace(config)  # a copy: fixed from now on
        # A model that splits results itself decides there how many columns items have.
        self.splits_results = self.has_own("postprocess_encoder_output")
        self._check_keywords()

    def _check_keywords(self) -> None:
        """Raise unless the methods take ``path=`` and ``axes=`` where the manager passes them."""
        config = self.config
        axes = list(
            dict.fromkeys(name for spec in config.graph_sets.values() for name in spec.axes)
        )
        needed: dict[str, Any] = {}
        for path, spec in config.graph_sets.items():
            needed |= path_arguments(config, path, [0] * len(spec.axes))
        whys = {
            "path": f"paths {', '.join(config.graph_sets)}",
            "axes": f"axes {', '.join(axes)}",
        }
        for name, takes_axes in _BY_PATH.items():
            for keyword in needed if takes_axes else needed.keys() - {"axes"}:
                if self.has_own(name) and not _takes(getattr(self.model, name), keyword):
                    method = f"{type(self.model).__name__}.{name}"
                    raise EncoderError.no_keyword(method=method, keyword=keyword, why=whys[keyword])

    def has_own(self, name: str) -> bool:
        """Return whether the model implements a method itself."""
        return _is_own(self.model, name)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.model, name, None) if name in OPTIONAL else getattr(self.model, name)
        if name in OPTIONAL and not callable(method):
            return MethodType(getattr(SupportsEncoderCudaGraph, name), self.model)
        return method
