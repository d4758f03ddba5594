"""What a captured step of ``transformers`` gets: a static cache, and inputs in fixed buffers.

The prefill runs as ``generate`` runs it, with a dynamic cache, which is then copied into a static
one that later calls keep (:func:`static_cache`, :func:`fill`). Layers with a sliding window have
the full length, since those of ``transformers`` count in Python, which a graph repeats; their mask
excludes what is outside of the window.

Which inputs a step gets is what ``prepare_inputs_for_generation`` returns for the token after the
prefill, since many models override it. Each becomes one of (:func:`described`):

=============  =====================================================================================
the ids        the token that the step before has selected
the cache      the static one
positions      a buffer, which each step advances by 1
the mask       two-dimensional, of the length of the cache: causality comes from the cache
other tensors  a buffer that each call fills; they must be the same for the next token
other values   baked into the step, and part of its key
=============  =====================================================================================
"""

import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from cgcompile.errors import shown

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache among the arguments of models."""

ENCODER_STATES = "encoder_outputs.last_hidden_state"
_FEWEST = 64  # states of an encoder that are padded


class NotHeld(Exception):
    """Why a captured step cannot have an input or a cache; its text is for people."""


# ---------------------------------------------------------------- cache


def dynamic_cache(model: Any) -> Any:
    """Return an empty cache for a prefill, such as ``generate`` makes."""
    from transformers import DynamicCache, EncoderDecoderCache

    make: Any = DynamicCache
    config = model.config.get_text_config(decoder=True)
    if not model.config.is_encoder_decoder:
        return make(config=config)
    return EncoderDecoderCache(make(config=config), make(config=config))


class RowLayer:
    """A static layer of a cache whose rows have different lengths.

    Masks and positions are arguments of the model: the layer has no length that would be right for
    all rows.

    Args:
        max_cache_len: how many positions there are.
        positions: ``[rows, tokens]``, where the next update writes; all layers of a cache share it.
    """

    is_compileable = False  # else transformers makes a mask from its length
    is_initialized = is_sliding = False

    def __init__(self, max_cache_len: int, positions: torch.Tensor) -> None:
        self.max_cache_len, self.positions = max_cache_len, positions

    def lazy_initialization(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for keys and values ``[rows, heads, tokens, size]``."""
        self.keys, self.values = (
            tensor.new_zeros((*tensor.shape[:2], self.max_cache_len, tensor.shape[-1]))
            for tensor in (keys, values)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; return those of all positions."""
        for tensor, states in ((self.keys, key_states), (self.values, value_states)):
            if len(states) == 1:  # the form that kernels of cgcompile replace
                tensor.index_copy_(2, self.positions[0], states)
            else:
                index = self.positions[:, None, :, None].expand(states.shape)
                tensor.scatter_(2, index, states)
        return self.keys, self.values

    def get_max_length(self) -> int:
        return self.max_cache_len


def _static_layer(source: Any, length: int, positions: torch.Tensor | None) -> Any:
    """Return a layer of fixed size in place of one of a dynamic cache."""
    from transformers import cache_utils

    kind: Any = type(source)
    layer: Any = None
    if kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
        layer = cache_utils.StaticLayer(max_cache_len=length)
        if positions is not None:
            layer = RowLayer(length, positions)
    elif positions is not None and hasattr(source, "conv_states"):
        raise NotHeld("states that cannot go back to where a draft was refused")
    elif kind is cache_utils.LinearAttentionLayer:
        return kind(number_of_states=source.number_of_states)
    elif kind in (
        cache_utils.LinearAttentionAndFullAttentionLayer,
        cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    ):
        layer = cache_utils.LinearAttentionAndStaticFullAttentionLayer(
            max_cache_len=length, number_of_states=source.number_of_states
        )
    elif kind.__name__ == "DummyLayer":  # not in transformers 5.17
        return kind()
    if layer is None:
        raise NotHeld(f"a cache with layers of type {kind.__name__}")
    layer.is_sliding = source.is_sliding  # which selects the mask
    return layer


def static_cache(
    model: Any,
    source: Any,
    length: int,
    cross: int = 0,
    positions: torch.Tensor | None = None,
) -> Any:
    """Return an empty static cache in place of a dynamic one.

    Args:
        model: the model.
        source: the dynamic cache.
        length: for how many positions it has room.
        cross: how many states of an encoder the cache of cross-attention has.
        positions: ``[rows, tokens]``, where each update writes, for rows that advance by different
            numbers of tokens; left out: behind what was written before.
    """
    from transformers import EncoderDecoderCache, StaticCache

    if isinstance(source, EncoderDecoderCache):
        own = static_cache(model, source.self_attention_cache, length)
        return EncoderDecoderCache(own, static_cache(model, source.cross_attention_cache, cross))
    make: Any = StaticCache
    cache = make(config=model.config.get_text_config(decoder=True), max_cache_len=1)
    cache.layers = [_static_layer(layer, length, positions) for layer in source.layers]
    return cache


def _pairs(cache: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the layers of two caches."""
    if hasattr(source, "cross_attention_cache"):
        yield from _pairs(cache.self_attention_cache, source.self_attention_cache)
        yield from _pairs(cache.cross_attention_cache, source.cross_attention_cache)
    else:
        yield from zip(cache.layers, source.layers, strict=True)


def fill(cache: Any, source: Any) -> None:
    """Write a dynamic cache into a static one, in place, and clear what is behind it."""
    for layer, filled in _pairs(cache, source):
        if hasattr(filled, "conv_states"):
            _fill_states(layer, filled)
        if getattr(filled, "keys", None) is not None and filled.is_initialized:
            _fill_positions(layer, filled)
    if hasattr(source, "is_updated"):
        cache.is_updated.update(source.is_updated)


def _fill_positions(layer: Any, source: Any) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(source.keys, source.values)
    past = int(source.get_seq_length())
    kept = source.keys.shape[-2]  # fewer, where a window has passed
    for target, tensor in ((layer.keys, source.keys), (layer.values, source.values)):
        target.zero_()
        target[:, :, past - kept : past].copy_(tensor)
    if not isinstance(layer, RowLayer):
        layer.cumulative_length.fill_(past)


def extend(source: Any, cache: Any, length: int) -> None:
    """Add to a dynamic cache, to a length, what steps have written to the static one."""
    source = getattr(source, "self_attention_cache", source)
    for layer, filled in _pairs(getattr(cache, "self_attention_cache", cache), source):
        if getattr(filled, "keys", None) is not None and filled.is_initialized:
            past = int(filled.get_seq_length())
            states = (tensor[:, :, past:length] for tensor in (layer.keys, layer.values))
            filled.update(*states)


def _fill_states(layer: Any, source: Any) -> None:
    from transformers.cache_utils import LinearAttentionLayer

    initialize = LinearAttentionLayer.lazy_initialization
    for number in range(source.number_of_states):
        if source.is_conv_states_initialized[number]:
            if not layer.is_conv_states_initialized[number]:
                initialize(layer, conv_states=source.conv_states[number], state_idx=number)
            layer.conv_states[number].copy_(source.conv_states[number])
        if source.is_recurrent_states_initialized[number]:
            if not layer.is_recurrent_states_initialized[number]:
                states = source.recurrent_states[number]
                initialize(layer, recurrent_states=states, state_idx=number)
            layer.recurrent_states[number].copy_(source.recurrent_states[number])
        layer.has_previous_state[number] = source.has_previous_state[number]


def takes_static_cache(model: Any) -> bool:
    """Return whether masks and positions of a model are right over a static cache.

    Others index tables by the length of the cache, which is then that of the longest text. States
    of layers without attention have one size in any cache.
    """
    if model._can_compile_fullgraph:
        return True
    layers = getattr(dynamic_cache(model), "layers", ())
    without_attention = [hasattr(x, "conv_states") and not hasattr(x, "keys") for x in layers]
    return bool(without_attention) and all(without_attention)


# ---------------------------------------------------------------- inputs


class Described(NamedTuple):
    """The inputs of a step, in place of those that ``prepare_inputs_for_generation`` returns.

    Attributes:
        key: what is baked into the step.
        tensors: the values of buffers, by name.
        build: ``(buffers, ids, cache) -> arguments of the model``.
        advance: names of the buffers that a step advances by 1.
    """

    key: Hashable
    tensors: dict[str, torch.Tensor]
    build: Callable[[dict[str, Any], torch.Tensor, Any], dict[str, Any]]
    advance: tuple[str, ...]


def mask_name(model: Any) -> str:
    """Return the name of the mask of the decoder; empty if the model takes none."""
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    return name if name in inspect.signature(type(model).forward).parameters else ""


def encoder_length(model: Any, kwargs: dict[str, Any]) -> tuple[int, torch.Tensor | None]:
    """Return how many states of the encoder a step reads, and their mask.

    With a mask it is a power of two, so that encoder inputs of many lengths share a cache: the
    states are padded. Without one, as of audio, it is the number of states; 0 without an encoder.
    """
    states = kwargs.get("encoder_outputs")
    if states is None:
        return 0, None
    rows, length = states[0].shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None and model.main_input_name == "input_ids":
        mask = torch.ones((rows, length), dtype=torch.long, device=states[0].device)
    if mask is None or mask.shape != (rows, length):
        return length, None
    return max(_FEWEST, 1 << length.bit_length()), mask  # at least one is padding


def with_mask(model: Any, ids: torch.Tensor, kwargs: dict[str, Any], cached: int) -> dict[str, Any]:
    """Return the arguments of the loop with a mask, where ``generate`` left out one of ones."""
    name = mask_name(model)
    if name and kwargs.get(name) is None:
        ones = torch.ones((ids.shape[0], cached), dtype=torch.long, device=ids.device)
        return kwargs | {name: ones}
    return kwargs


def frequencies(model: Any) -> list[torch.Tensor]:
    """Return what a rotary embedding may compute anew in each step, from the positions."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def follows_length(model: Any) -> bool:
    """Return whether a rotary embedding has other frequencies in a longer text."""
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    return any("dynamic" in kind or "longrope" in kind for kind in kinds)


def of_one_token(inputs: dict[str, Any]) -> dict[str, Any]:
    """Cut the types of tokens to the last one, which transformers 5.17 passes of the whole text."""
    return {
        name: value[:, -1:] if name.endswith("token_type_ids") and value is not None else value
        for name, value in inputs.items()
    }


def described(
    model: Any,
    prepared: dict[str, Any],
    after: Callable[[], dict[str, Any]],
    mask: torch.Tensor | None,
    known: dict[Hashable, tuple[str, ...]],
    cross: int,
) -> Described:
    """Describe the inputs of a step.

    Args:
        model: the model.
        prepared: what ``prepare_inputs_for_generation`` returns for one token.
        after: returns what it returns for the next one.
        mask: the two-dimensional mask, of the length of the cache.
        known: which inputs advance, by the layout of the inputs; it is added to.
        cross: to how many the states of the encoder are padded, where a mask excludes the rest.

    Raises:
        NotHeld: an input that has no place in a captured step.
    """
    own_mask = mask_name(model)
    ids_name = _name_of_ids(model, prepared)
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for name, value in prepared.items():
        if name in (ids_name, *CACHES):
            constants[name] = None
        elif name == own_mask and value is not None and mask is not None:
            tensors[name] = mask
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, (bool, int, float, str, type(None))):
            constants[name] = value
        elif hasattr(value, "last_hidden_state"):
            outputs[name] = type(value)
            tensors[f"{name}.last_hidden_state"] = value.last_hidden_state
        else:
            raise NotHeld(f"the input {name}={shown(value)}")
    changing = [name for name, tensor in tensors.items() if tensor is prepared.get(name)]
    if cross and "attention_mask" in tensors and ENCODER_STATES in tensors:
        _pad_encoder(model, tensors, cross)
    layouts = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    key = (tuple(constants.items()), tuple(outputs.items()), tuple(layouts))
    if key not in known:
        known[key] = _advancing(changing, prepared, after())

    def build(buffers: dict[str, Any], ids: torch.Tensor, cache: Any) -> dict[str, Any]:
        inputs = dict(constants)
        for name, buffer in buffers.items():
            first, _, field = name.partition(".")
            inputs[first] = outputs[first](**{field: buffer}) if field else buffer
        inputs |= {name: cache for name in CACHES if name in constants}
        return inputs | {ids_name: ids}

    return Described(key, tensors, build, known[key])


def _name_of_ids(model: Any, prepared: dict[str, Any]) -> str:
    """Return the name of the ids, which must be one token of each row."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    ids = prepared.get(name)
    if prepared.get("inputs_embeds") is not None or ids is None:
        raise NotHeld("a step that gets embeddings in place of ids")
    if ids.dim() != 2 or ids.shape[1] != 1:
        raise NotHeld(f"a step that gets ids of shape {list(ids.shape)}")
    return name


def _advancing(
    names: list[str], prepared: dict[str, Any], after: dict[str, Any]
) -> tuple[str, ...]:
    """Return the inputs that are one more at the next token; the others must be the same."""
    advancing = []
    for name in names:
        value, later = prepared[name], after.get(name)
        if value is later:
            continue
        if not isinstance(later, torch.Tensor) or later.shape != value.shape:
            raise NotHeld(f"the input {name}, which changes from token to token")
        if torch.equal(value, later):
            continue
        if value.is_floating_point() or not torch.equal(value + 1, later):
            raise NotHeld(f"the input {name}, which changes from token to token")
        advancing.append(name)
    return tuple(advancing)


def _pad_encoder(model: Any, tensors: dict[str, torch.Tensor], length: int) -> None:
    """Pad the states of the encoder, and make the mask that attention adds.

    Models make it from a two-dimensional one at each step, and read on the host whether all
    positions count.
    """
    from transformers.masking_utils import create_bidirectional_mask

    states = tensors[ENCODER_STATES]
    more = length - states.shape[1]
    states = torch.nn.functional.pad(states, (0, 0, 0, more))
    tensors[ENCODER_STATES] = states
    tensors["attention_mask"] = create_bidirectional_mask(
        config=model.config.get_text_config(decoder=True),
        inputs_embeds=states[:, :1],
        attention_mask=torch.nn.functional.pad(tensors["attention_mask"], (0, more)),
        encoder_hidden_states=states,
    )
