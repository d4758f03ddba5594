"""What a model does so that its encoder runs on graphs: :class:`SupportsEncoderCudaGraph`.

The method names are those that models of serving engines have already. Six of them say what only
the model knows; the others have defaults here, which a model gets by inheriting, and the manager
lends to a model that does not. :class:`~cgcompile.encoder.PatchEncoder` has all of them for the
common layout.

How they are called: with one path and no axes, as the source documents have it. With several
paths, or one of a name of its own, ``path=`` is given by name to those that have it below, and
``axes=`` where there are capture axes.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from cgcompile import compat
from cgcompile.encoder.defs import (
    DEFAULT,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from cgcompile.encoder.results import joined_rows, split_rows
from cgcompile.errors import EncoderError

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
        items, frames = len(specs), sum(each.frames for each in specs)
        named: dict[str, Any] = {} if list(config.graph_sets) == [DEFAULT] else {"path": path}
        if config.capture_axes:
            names = [axis.name for axis in config.capture_axes]
            named["axes"] = {
                name: max((each.axes.get(name, 0) for each in specs), default=0) for name in names
            }
        made = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, items, frames, **named)
        inputs: dict[str, torch.Tensor] = {}
        for key in config.buffer_keys:
            value = made.values[key]
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
        given = {key for key, value in mm_kwargs.items() if value is not None}
        found = [each for each in known if any(_names(key, each) for key in given)]
        if len(found) != 1:
            raise EncoderError.modality(keys=sorted(given), found=found, known=known)
        return found[0]

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
        found: list[list[Any]] = [[] for _ in indices]
        for path, tree in parts.items():
            for mine, part in zip(found, split_rows(tree, counts[path]), strict=True):
                mine.append(part)
        for index, mine in zip(indices, found, strict=True):
            joined = joined_rows(mine)
            dest[index] = compat.tree_map(torch.clone, joined) if clone else joined


@contextmanager
def named_buffers(keys: Collection[str]) -> Iterator[None]:
    """Name the buffers where a forward reads a key that is not among them.

    Raises:
        EncoderError: a ``KeyError`` of a name that no buffer has.
    """
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
    found = getattr(model, name, None)
    default = getattr(SupportsEncoderCudaGraph, name)
    return callable(found) and getattr(found, "__func__", found) is not default


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
        each.kind is inspect.Parameter.VAR_KEYWORD
        or (each.name == keyword and each.kind in by_name)
        for each in known
    )


class CheckedModel:
    """A model's methods of the protocol, each its own or the default.

    Args:
        model: what has the mandatory methods.

    Attributes:
        model: as given.

    Raises:
        EncoderError: a mandatory method is missing, or the model is of the older protocol.
    """

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

    def check_paths(self, config: EncoderCudaGraphConfig) -> None:
        """Raise unless the methods take ``path=`` and ``axes=`` where the manager gives them.

        Raises:
            EncoderError: one takes no such keyword.
        """
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
        found = getattr(self.model, name, None)
        default = getattr(SupportsEncoderCudaGraph, name)
        return found if callable(found) else MethodType(default, self.model)
