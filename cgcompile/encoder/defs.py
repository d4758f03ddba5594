"""What a model and the manager of its encoder graphs tell each other: plain data.

The names and defaults are those that engine authors know. An encoder with one set of graphs needs
nothing else; ``paths``, ``capture_axes``, ``offset_keys``, ``on_none`` and ``frames`` are for what
those names cannot say: several graph sets, a second captured shape, offsets whose tail must be a
real sequence, and videos whose frames are sequences of attention.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from cgcompile.errors import ConfigError, EncoderError
from cgcompile.settings import is_whole, require_fields, require_items, require_kind, whole

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
        found = getattr(instance, name)
        if type(found) is not int and found is not None:
            object.__setattr__(instance, name, whole(found))


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
            settled = {key: whole(each) for key, each in numbers.items()}
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
        if least is not None and not is_whole(least, 1):
            where = "EncoderCudaGraphPathConfig"
            raise ConfigError.bad_value(
                name="min_token_budget", where=where, value=least, expected="at least 1, or None"
            )
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
        require_items("values", f"EncoderCaptureAxis {self.name!r}", self.values)
        numbers = [whole(each) for each in self.values]
        values = tuple(sorted({number for number in numbers if number is not None}))
        if not values or None in numbers or values[0] < 0:
            where = f"EncoderCaptureAxis {self.name!r}"
            raise ConfigError.bad_value(
                name="values", where=where, value=self.values, expected="at least one whole number"
            )
        object.__setattr__(self, "values", values)


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
            found = getattr(self, name)
            if not is_whole(found, lowest):
                expected = f"a whole number of at least {lowest}"
                raise ConfigError.bad_value(name=name, where=_WHERE, value=found, expected=expected)
        _settle(self, least)
        for name in ("modalities", "buffer_keys"):
            found = getattr(self, name)
            require_items(name, _WHERE, found, str)
            if not found or len(set(found)) < len(found):
                expected = "at least one name, each once"
                raise ConfigError.bad_value(name=name, where=_WHERE, value=found, expected=expected)

    def _check_dual_path(self) -> None:
        named = ("global_token_per_image", "local_token_per_patch")
        given = [name for name in named if getattr(self, name)]
        if given and not self.enable_dual_path_graph:
            what = f"EncoderCudaGraphConfig({given[0]}={getattr(self, given[0])})"
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
        said = {
            "padding_logics": self.padding_logics,
            "offset_keys": self.offset_keys,
            "on_none": self.on_none,
        }
        for name, keys in said.items():
            for key in keys:
                if key not in self.buffer_keys:
                    expected = f"names among buffer_keys ({', '.join(self.buffer_keys)})"
                    raise ConfigError.bad_value(
                        name=name, where=_WHERE, value=key, expected=expected
                    )
        for key in self.offset_keys:
            if key in self.padding_logics:
                what = f"a padding logic for {key!r}, which is among offset_keys too,"
                raise ConfigError.impossible(
                    what=what, because="each says what the tail holds", instead="Keep one."
                )
        if isinstance(self.offset_keys, Mapping):
            for key, rows in self.offset_keys.items():
                if rows is not None and not is_whole(rows, 1):
                    expected = "a whole number of at least 1, or None"
                    raise ConfigError.bad_value(
                        name=f"offset_keys[{key!r}]", where=_WHERE, value=rows, expected=expected
                    )
        for key, what in self.on_none.items():
            if what not in (KEEP, ZERO):
                expected = "'keep' or 'zero'"
                raise ConfigError.bad_value(
                    name=f"on_none[{key!r}]", where=_WHERE, value=what, expected=expected
                )


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
