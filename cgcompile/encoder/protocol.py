"""What a model does so that its encoder runs on graphs: :class:`SupportsEncoderCudaGraph`.

The names and defaults are those that engine authors know. An encoder with one set of graphs needs
nothing else; ``paths``, ``capture_axes``, ``offset_keys``, ``on_none`` and ``frames`` are for
several graph sets, a second captured size, offsets whose tail must be a real sequence, and videos
whose frames are sequences of attention. Six methods are mandatory; the others have defaults, which
a model gets by inheriting, or from :class:`CheckedModel`. :class:`~cgcompile.encoder.PatchEncoder`
has all of them for the common layout.

With one path and no axes the methods are called without ``path=`` and ``axes=``. What a graph
returns is in its pool, and the next replay overwrites it: so real rows are copied right after a
replay, one kernel per tensor.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import ConfigError, EncoderError
from cgcompile.settings import is_whole, require, require_fields, require_items, require_kind, whole

DEFAULT, GLOBAL, LOCAL = "default", "global", "local"
VIDEO = "video"
KEEP, ZERO = "keep", "zero"
_WHERE = "EncoderCudaGraphConfig"

EncoderCudaGraphPaddingLogic: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""``logic(dst, src)``: write all of the captured buffer ``dst`` from the rows ``src`` of a replay.

It runs before each replay, in place of zeroing and copying; ``dst`` keeps shape and address, and
nothing of it is zeroed before.
"""


def _settle(instance: object, names: Iterable[str]) -> None:
    """Replace whole numbers of other types in these fields of a frozen dataclass by ints."""
    for name in names:
        value = getattr(instance, name)
        if type(value) is not int and value is not None:
            object.__setattr__(instance, name, whole(value))


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
        EncoderError: a number that is none, or below 0.
    """

    input_size: int
    output_tokens: int
    global_output_tokens: int = 0
    local_output_tokens: int = 0
    path_output_tokens: Mapping[str, int] = field(default_factory=dict)
    frames: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {
            "input_size": self.input_size,
            "output_tokens": self.output_tokens,
            "global_output_tokens": self.global_output_tokens,
            "local_output_tokens": self.local_output_tokens,
            "frames": self.frames,
        }
        require_kind("path_output_tokens", "EncoderItemSpec", self.path_output_tokens, Mapping)
        require_kind("axes", "EncoderItemSpec", self.axes, Mapping)
        named = (*self.path_output_tokens.items(), *self.axes.items())
        for name, count in (*counts.items(), *named):
            if not is_whole(count, 0):
                raise EncoderError.item_number(name=name, found=count)
        _settle(self, counts)
        for name in ("path_output_tokens", "axes"):
            numbers = getattr(self, name)
            settled = {key: whole(number) for key, number in numbers.items()}
            if None not in settled.values():  # else it is named where it is used
                object.__setattr__(self, name, settled)

    def tokens(self, path: str = DEFAULT) -> int:
        """Rows of the result of one path; 0 for a path that the item does not take."""
        if type(path) is not str:
            require_kind("path", "EncoderItemSpec.tokens", path, str)
        if path in self.path_output_tokens:
            return self.path_output_tokens[path]
        named = {
            DEFAULT: self.output_tokens,
            GLOBAL: self.global_output_tokens,
            LOCAL: self.local_output_tokens,
        }
        return 0 if self.path_output_tokens else named.get(path, 0)


@dataclass(frozen=True)
class EncoderCudaGraphPathConfig:
    """One set of graphs of an encoder that has several.

    Attributes:
        min_token_budget: where its inferred budgets begin, in output tokens; None: where those of
            :meth:`~cgcompile.encoder.SupportsEncoderCudaGraph.get_encoder_cudagraph_budget_range`
            begin.
    """

    min_token_budget: int | None = None

    def __post_init__(self) -> None:
        least = self.min_token_budget
        valid = least is None or is_whole(least, 1)
        where = "EncoderCudaGraphPathConfig"
        require(valid, "min_token_budget", where, least, "at least 1, or None")
        _settle(self, ("min_token_budget",))


@dataclass(frozen=True)
class EncoderCaptureAxis:
    """A second size that graphs are captured for, such as the longest sequence or a grid.

    A group of items takes the smallest value that is enough for each of them; without one it runs
    eager.

    Attributes:
        name: as items and the model call it.
        values: what is captured, whole numbers.
    """

    name: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        require_fields(self, but=("values",))
        where = f"EncoderCaptureAxis {self.name!r}"
        require_items("values", where, self.values)
        valid = bool(self.values) and all(is_whole(value, 0) for value in self.values)
        require(valid, "values", where, self.values, "at least one whole number")
        object.__setattr__(self, "values", tuple(sorted(set(map(int, self.values)))))


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """What a model says of its encoder, once. Copied by the manager, so fixed for its lifetime.

    Attributes:
        modalities: what it takes, such as ``["image", "video"]``.
        buffer_keys: the tensors that graphs read; exactly these are written before each replay.
        out_hidden_size: columns H of the result [tokens, H]; of several tensors, those of one at
            least. The manager compares it with what the forward returns.
        padding_logics: by key, what writes a buffer in place of zeroing its tail and copying.
        max_frames_per_video: frames of the longest video; used with ``"video"`` among the
            modalities alone. 0, no videos: room for one frame for each item, whatever a user gives.
        enable_dual_path_graph: two sets of graphs, ``"global"`` and ``"local"``.
        global_token_per_image: output tokens of one global image; the least budget of its path.
        local_token_per_patch: output tokens of one local patch; the least budget of its path.
        paths: several sets of graphs by name; left out: ``"default"``, or the two of dual path. See
            :attr:`graph_sets`.
        capture_axes: further sizes that each graph is captured for.
        offset_keys: which buffers are offsets (``cu_seqlens``, one dimension, rising): entries
            behind the real ones go on to the last entry that the buffer had at capture, so that
            padded rows are one real sequence at the end; or, given as ``{key: rows}``, sequences of
            at most so many rows. Attention that leaves rows unwritten leaves what the memory pool
            held, and that may be NaN.
        input_rows_per_token: rows that the input buffer has for each output token; an item with
            more of them takes the room of more tokens. 0: the input always fits.
        on_none: by key, what a ``None`` in the replay buffers does: ``"keep"`` (also where a key is
            not named) or ``"zero"``.

    Raises:
        ConfigError: fields that contradict each other, or values that cannot be.
    """

    modalities: Sequence[str]
    buffer_keys: Sequence[str]
    out_hidden_size: int
    padding_logics: Mapping[str, EncoderCudaGraphPaddingLogic] = field(default_factory=dict)
    max_frames_per_video: int = 1
    enable_dual_path_graph: bool = False
    global_token_per_image: int = 0
    local_token_per_patch: int = 0
    paths: Mapping[str, EncoderCudaGraphPathConfig] = field(default_factory=dict)
    capture_axes: tuple[EncoderCaptureAxis, ...] = ()
    offset_keys: Sequence[str] | Mapping[str, int | None] = ()
    input_rows_per_token: int = 0
    on_none: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_fields(self, but=("modalities", "buffer_keys"))
        self._check_values()
        self._check_dual_path()
        self._check_keys()
        for name in ("modalities", "buffer_keys"):
            object.__setattr__(self, name, list(getattr(self, name)))
        for name in ("padding_logics", "on_none"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "offset_keys", self.longest_padding)
        object.__setattr__(self, "capture_axes", tuple(self.capture_axes))
        object.__setattr__(self, "paths", dict(self.paths))

    @property
    def longest_padding(self) -> dict[str, int | None]:
        """By offset key the most rows of a padding sequence; None: all of them in one."""
        keys = self.offset_keys
        if not isinstance(keys, Mapping):
            return dict.fromkeys(keys)
        return {key: None if rows is None else whole(rows) for key, rows in keys.items()}

    @property
    def graph_sets(self) -> dict[str, EncoderCudaGraphPathConfig]:
        """The sets of graphs by path: ``paths``, or what the other fields imply.

        No field holds it, so that ``dataclasses.replace`` derives it from the new fields.
        """
        if self.paths:
            return dict(self.paths)
        if not self.enable_dual_path_graph:
            return {DEFAULT: EncoderCudaGraphPathConfig()}
        return {
            GLOBAL: EncoderCudaGraphPathConfig(self.global_token_per_image or None),
            LOCAL: EncoderCudaGraphPathConfig(self.local_token_per_patch or None),
        }

    @property
    def most_frames_of_an_item(self) -> int:
        """``max_frames_per_video`` of a model of videos; at most 1 of any other."""
        frames = self.max_frames_per_video
        return frames if VIDEO in self.modalities else min(frames, 1)

    def _check_values(self) -> None:
        least = {
            "out_hidden_size": 1,
            "max_frames_per_video": 0,
            "input_rows_per_token": 0,
            "global_token_per_image": 0,
            "local_token_per_patch": 0,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            expected = f"a whole number of at least {lowest}"
            require(is_whole(value, lowest), name, _WHERE, value, expected)
        _settle(self, least)
        for name in ("modalities", "buffer_keys"):
            names = getattr(self, name)
            require_items(name, _WHERE, names, str)
            unique = bool(names) and len(set(names)) == len(names)
            require(unique, name, _WHERE, names, "at least one name, each once")

    def _check_dual_path(self) -> None:
        named = ("global_token_per_image", "local_token_per_patch")
        listed = [name for name in named if getattr(self, name)]
        if listed and not self.enable_dual_path_graph:
            what = f"EncoderCudaGraphConfig({listed[0]}={getattr(self, listed[0])})"
            because = "it is used with enable_dual_path_graph=True alone"
            raise ConfigError.impossible(
                what=what, because=because, instead="Set that too, or leave this out."
            )
        both = set(self.paths) not in (set(), {GLOBAL, LOCAL})
        if self.enable_dual_path_graph and both:
            what = f"enable_dual_path_graph with paths {sorted(self.paths)}"
            because = "dual path means the paths 'global' and 'local'"
            raise ConfigError.impossible(what=what, because=because, instead="Say one of the two.")
        if self.input_rows_per_token and (self.enable_dual_path_graph or len(self.paths) > 1):
            what, because = (
                "input_rows_per_token with several paths",
                "each has an input of its own",
            )
            raise ConfigError.impossible(what=what, because=because, instead="Leave it out.")

    def _check_keys(self) -> None:
        expected = f"names among buffer_keys ({', '.join(self.buffer_keys)})"
        for name in ("padding_logics", "offset_keys", "on_none"):
            for key in getattr(self, name):
                require(key in self.buffer_keys, name, _WHERE, key, expected)
        for key in self.offset_keys:
            if key in self.padding_logics:
                what = f"a padding logic for {key!r}, which is among offset_keys too,"
                raise ConfigError.impossible(
                    what=what, because="each says what the tail holds", instead="Keep one."
                )
        rows_by_key = self.offset_keys if isinstance(self.offset_keys, Mapping) else {}
        for key, rows in rows_by_key.items():
            valid = rows is None or is_whole(rows, 1)
            expected = "a whole number of at least 1, or None"
            require(valid, f"offset_keys[{key!r}]", _WHERE, rows, expected)
        for key, rule in self.on_none.items():
            known = rule in (KEEP, ZERO)
            require(known, f"on_none[{key!r}]", _WHERE, rule, "'keep' or 'zero'")


@dataclass
class EncoderCudaGraphCaptureInputs:
    """The buffers of one graph.

    Attributes:
        values: by key of ``buffer_keys``. The manager keeps these very tensors, writes into them
            before each replay, and gives them to the forward that is recorded.
    """

    values: dict[str, torch.Tensor]


@dataclass
class EncoderCudaGraphReplayBuffers:
    """What a group of items puts into the buffers of a graph.

    Attributes:
        values: by key of ``buffer_keys``: rows, at most as many as the buffer has; ``None`` leaves
            the buffer as the last replay left it, unless ``on_none`` says otherwise.
    """

    values: dict[str, torch.Tensor | None]


def checked_rows(
    tree: Any, least: int, columns: int | None, method: str, exactly: bool = False
) -> list[torch.Tensor]:
    """The tensors of a result, each with enough rows; see :func:`check_columns`."""
    leaves = compat.tree_leaves(tree)
    for leaf in leaves or [None]:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        if fits and (len(leaf) == least if exactly else len(leaf) >= least):
            continue
        found = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        count = "" if exactly else "at least "
        expected = f"tensors of {count}{least} rows each, the output tokens"
        raise EncoderError.returned(method=method, found=str(found), expected=expected)
    if columns is not None:
        check_columns(leaves, columns, method)
    return leaves


def check_columns(leaves: Sequence[Any], columns: int, method: str) -> None:
    """Raise unless one tensor of a result has so many columns."""
    sizes = [leaf.shape[-1] if leaf.dim() > 1 else 1 for leaf in leaves]
    if columns not in sizes:
        raise EncoderError.columns(method=method, found=dict.fromkeys(sizes), expected=columns)


def own_rows(tree: Any, rows: int) -> Any:
    """The first rows of a graph's result, in memory of their own; ordered after the replay."""
    return compat.tree_map(lambda leaf: leaf[:rows].clone(), tree)


def empty_rows(tree: Any) -> Any:
    """A result of the same structure without rows."""
    return compat.tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape[1:])), tree)


def split_rows(tree: Any, counts: Sequence[int]) -> list[Any]:
    """A result of several items, [sum of counts, ...], as views of one item each."""
    total = sum(counts)
    if isinstance(tree, torch.Tensor):
        return list(torch.split(tree[:total], list(counts)))
    leaves, spec = compat.tree_leaves(tree), compat.tree_spec(tree)
    parts = [torch.split(leaf[:total], list(counts)) for leaf in leaves]
    return [compat.tree_unflatten(list(mine), spec) for mine in zip(*parts, strict=True)]


def joined_rows(trees: Sequence[Any]) -> Any:
    """Results one after the other; a single one as it is, and one without rows not at all."""
    kept = [tree for tree in trees if any(len(leaf) for leaf in compat.tree_leaves(tree))]
    kept = kept or list(trees[:1])
    if len(kept) == 1:
        return kept[0]
    columns = zip(*map(compat.tree_leaves, kept), strict=True)
    spec = compat.tree_spec(kept[0])
    return compat.tree_unflatten([torch.cat(column) for column in columns], spec)


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

# What is given path= where there are several paths; True: axes= as well.
_BY_PATH = {
    "prepare_encoder_cudagraph_capture_inputs": True,
    "prepare_encoder_cudagraph_replay_buffers": True,
    "encoder_cudagraph_forward": True,
    "encoder_eager_forward": False,
}


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """A model whose encoder can run on graphs of fixed budgets.

    ``mm_kwargs`` is one call: the keyword arguments of one modality, for any number of items.
    Mandatory: the first six methods. Nothing here owns results: what the forward returns is copied.
    """

    supports_encoder_cudagraph: ClassVar[bool] = True

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What the encoder takes, in which buffers. Called once by a manager."""
        raise EncoderError.no_method(
            model=type(self).__name__, method="get_encoder_cudagraph_config"
        )

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """One description for each item of a call, in order. Called once per call.

        It may read sizes from the device, which synchronises; grids on the CPU do not.
        """
        raise EncoderError.no_method(
            model=type(self).__name__, method="get_encoder_cudagraph_item_specs"
        )

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The call with these items alone, in this order; ``[]`` must be accepted."""
        raise EncoderError.no_method(
            model=type(self).__name__, method="select_encoder_cudagraph_items"
        )

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
        """Buffers for one graph, filled with something that the forward can run on.

        Args:
            token_budget: rows B of the result.
            max_batch_size: most items of one replay.
            max_frames_per_batch: most frames of one replay: room for that many sequences, and, for
                offsets, for one more of padding.
            device: where the buffers go.
            dtype: of floating point buffers.
            path: which set of graphs.
            axes: by capture axis the value that is captured.

        Returns:
            Tensors that the manager owns from now on, one for each of ``buffer_keys``.
        """
        raise EncoderError.no_method(
            model=type(self).__name__, method="prepare_encoder_cudagraph_capture_inputs"
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> EncoderCudaGraphReplayBuffers:
        """What these items put into the buffers: real rows alone, on the device or on the CPU."""
        raise EncoderError.no_method(
            model=type(self).__name__, method="prepare_encoder_cudagraph_replay_buffers"
        )

    def encoder_cudagraph_forward(
        self,
        inputs: dict[str, torch.Tensor],
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> Any:
        """What graphs record: from the buffers, [B, H], or tensors [B, ...] in dicts and tuples.

        ``inputs`` is a dictionary of its own, to take from as one likes. Host values that it reads,
        such as a longest sequence, are frozen: take the largest that the budget allows.
        """
        raise EncoderError.no_method(model=type(self).__name__, method="encoder_cudagraph_forward")

    # ------------------------------------------------------- with defaults

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], *, path: str = DEFAULT) -> Any:
        """The result of these items without a graph: the same tensors, [output tokens, ...].

        Left out: the forward that graphs record, on replay buffers as they are, without padding.

        Raises:
            EncoderError: a replay buffer is None.
        """
        config = self.get_encoder_cudagraph_config()
        specs = self.get_encoder_cudagraph_item_specs(mm_kwargs)
        items, frames = len(specs), sum(spec.frames for spec in specs)
        named: dict[str, Any] = {} if list(config.graph_sets) == [DEFAULT] else {"path": path}
        if config.capture_axes:
            names = [axis.name for axis in config.capture_axes]
            named["axes"] = {
                name: max((spec.axes.get(name, 0) for spec in specs), default=0) for name in names
            }
        buffers = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, items, frames, **named)
        inputs: dict[str, torch.Tensor] = {}
        for key in config.buffer_keys:
            value = buffers.values[key]
            if value is None:
                raise EncoderError.nothing_to_run_on(key=key)
            inputs[key] = value
        return self.encoder_cudagraph_forward(inputs, **named)

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        """(least, most) output tokens of a call that is worth a graph; from ``settings``.

        ``settings`` is whatever the manager was given under that name. Called unless token budgets
        and ``max_batch_size`` are both given; needed only where token budgets are not.
        """
        raise EncoderError.no_range(model=type(self).__name__)

    def get_input_modality(self, mm_kwargs: Mapping[str, Any]) -> str:
        """Which modality a call has. Left out: the one that its keys name.

        A model of one modality has always that one. ``pixel_values`` alone are images.

        Raises:
            EncoderError: keys of none of the modalities, or of several.
        """
        known = list(self.get_encoder_cudagraph_config().modalities)
        if len(known) == 1:
            return known[0]
        keys = {key for key, value in mm_kwargs.items() if value is not None}
        matching = [modality for modality in known if any(_names(key, modality) for key in keys)]
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

        Left out: consecutive rows, as views; those of several paths one after the other.

        Args:
            output: [output tokens, ...], the rows of the items one after the other, in the order
                of ``indices``. Several paths: a dictionary by path; one without tokens is left out,
                but for items that have none on any path: these come together, with all paths.
                It is memory of this call's own: views of it stay valid.
            indices: places of the items in the call.
            per_item_out_tokens: output tokens of each item; several paths: a dictionary of lists.
            dest: where to put the results.
            clone: copy the rows, which the manager never asks for.
            batch_mm_kwargs: the call with these items alone.
        """
        parts = output if isinstance(per_item_out_tokens, Mapping) else {DEFAULT: output}
        counts = per_item_out_tokens
        if not isinstance(counts, Mapping):
            counts = {DEFAULT: counts}
        columns: list[list[Any]] = [[] for _ in indices]
        for path, tree in parts.items():
            for mine, part in zip(columns, split_rows(tree, counts[path]), strict=True):
                mine.append(part)
        for index, mine in zip(indices, columns, strict=True):
            joined = joined_rows(mine)
            dest[index] = compat.tree_map(torch.clone, joined) if clone else joined


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


def _names(key: str, modality: str) -> bool:
    return modality in key or (modality == "image" and key == "pixel_values")


def _is_own(model: object, name: str) -> bool:
    """Whether a model brings a method itself, on its class or on the object."""
    method = getattr(model, name, None)
    default = getattr(SupportsEncoderCudaGraph, name)
    return callable(method) and getattr(method, "__func__", method) is not default


def supports_encoder_cudagraph(model: object) -> bool:
    """Whether a manager takes the model: it has the mandatory methods, inherited or not."""
    return all(_is_own(model, name) for name in MANDATORY)


def _takes(method: Any, keyword: str) -> bool:
    """Whether a method can be called with a keyword; True where its signature is unknown."""
    try:
        known = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return True
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        or (parameter.name == keyword and parameter.kind in by_name)
        for parameter in known
    )


class CheckedModel:
    """A model's methods of the protocol, each its own or the default."""

    def __init__(self, model: Any) -> None:
        self.model = model
        name = type(model).__name__
        if not _is_own(model, "get_encoder_cudagraph_item_specs"):
            older = [each for each in _OLDER if callable(getattr(model, each, None))]
            if older:
                raise EncoderError.older_protocol(model=name, found=older)
        for method in MANDATORY:
            if not _is_own(model, method):
                raise EncoderError.no_method(model=name, method=method)
        config = model.get_encoder_cudagraph_config()
        if not isinstance(config, EncoderCudaGraphConfig):
            raise EncoderError.returned(
                method="get_encoder_cudagraph_config",
                found=type(config).__name__,
                expected="an EncoderCudaGraphConfig",
            )
        self.config = replace(config)  # a copy: fixed from now on
        # A model that splits results itself decides there how many columns items have.
        self.splits_results = self.has_own("postprocess_encoder_output")
        self._check_paths()

    def _check_paths(self) -> None:
        """Raise unless the methods take ``path=`` and ``axes=`` where the manager passes them."""
        config = self.config
        for name, graphs in _BY_PATH.items():
            wanted = {"path": f"paths {', '.join(config.graph_sets)}"}
            if list(config.graph_sets) == [DEFAULT]:
                wanted = {}
            if graphs and config.capture_axes:
                wanted["axes"] = f"axes {', '.join(axis.name for axis in config.capture_axes)}"
            for keyword, why in wanted.items():
                if self.has_own(name) and not _takes(getattr(self.model, name), keyword):
                    method = f"{type(self.model).__name__}.{name}"
                    raise EncoderError.no_keyword(method=method, keyword=keyword, why=why)

    def has_own(self, name: str) -> bool:
        """Whether the model brings a method itself, so that the default is not used."""
        return _is_own(self.model, name)

    def __getattr__(self, name: str) -> Any:
        if name not in OPTIONAL:
            return getattr(self.model, name)
        method = getattr(self.model, name, None)
        default = getattr(SupportsEncoderCudaGraph, name)
        return method if callable(method) else MethodType(default, self.model)
