"""One call of ``generate`` that runs captured steps: its prompt, their state, and the result.

A :class:`Text` is one call, a :class:`Kept` what later calls find again. The rule: what a call
passes is copied into a kept buffer, or is a part of the key of a step.
"""

import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgcompile.errors import ConfigError
from cgcompile.integrations import decode_inputs, next_token
from cgcompile.integrations.decode_inputs import CACHES, NotHeld
from cgcompile.integrations.next_token import Prompt

Attribute = tuple[torch.nn.Module, str]
Forward = Callable[[Any, dict[str, Any]], torch.Tensor]
"""The logits of a model, ``[rows, tokens, vocabulary]``, from its inputs."""


def tensors_beside_weights(model: torch.nn.Module) -> dict[Attribute, torch.Tensor]:
    """Return the tensors that modules have as plain attributes."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@dataclass(eq=False)
class Kept:
    """Caches with the buffers and steps that read them, of one number of rows.

    Attributes:
        caches: by their names in the state.
        advancing: which inputs advance, by the name of the cache and the layout of the inputs.
        loops: by what is baked into a step.
        attributes: tensors that the modules of the model have beside weights, at the last capture.
        held: buffers of those that calls replace, such as the offsets of positions of Qwen-VL.
        used: the number of the last call.
    """

    caches: dict[str, Any]
    length: int
    buffers: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    advancing: dict[str, dict[Hashable, tuple[str, ...]]] = field(default_factory=dict)
    loops: dict[Hashable, Any] = field(default_factory=dict)
    attributes: dict[Attribute, torch.Tensor] = field(default_factory=dict)
    held: dict[Attribute, torch.Tensor] = field(default_factory=dict)
    busy: threading.Lock = field(default_factory=threading.Lock)
    used: int = 0

    def buffer(self, name: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Return the buffer of a name, of the shape of a value, with the value in it."""
        key = (name, tuple(value.shape), value.dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        return self.buffers[key].copy_(value)

    def hold_replaced(self, model: torch.nn.Module) -> None:
        """Keep buffers for the attributes that are others than at the last capture."""
        now = tensors_beside_weights(model)
        for attribute, value in now.items():
            if self.attributes.get(attribute) is not value:
                self.held.setdefault(attribute, value.clone())
        self.attributes = now

    def release(self) -> None:
        for steps in self.loops.values():
            steps.release()
        self.loops.clear()
        self.attributes.clear()
        self.held.clear()
        self.buffers.clear()


@dataclass
class Call:
    """What ``generate`` passes."""

    model: Any
    ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    kwargs: dict[str, Any]

    @property
    def samples(self) -> bool:
        return bool(self.config.do_sample)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the default generator, from which a text is sampled."""
        if not self.samples:
            return None
        return _generators(self.model.device).get_rng_state()  # type: ignore[no-any-return]

    def set_random_state(self, state: torch.Tensor | None) -> None:
        if state is not None:
            _generators(self.model.device).set_rng_state(state)

    def own_way(self, **more: Any) -> Any:
        """Run the loop of ``generate``."""
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        name = GENERATION_MODES_MAPPING[self.config.get_generation_mode()]
        if "/" in name:
            raise ConfigError.impossible(
                what=f"custom_generate with the decoding of {name}",
                because="it is a custom_generate of its own",
                instead="Leave custom_generate out.",
            )
        if name == "_assisted_decoding":
            more["inputs_tensor"] = self.ids
        run = getattr(type(self.model), name)
        return run(
            self.model,
            self.ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            **more,
            **self.kwargs,
        )


def _generators(device: torch.device) -> Any:
    """Return the module of the default generator of a device."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


ON_DEVICE = ("MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria")
"""Stopping criteria that steps and their number stand for."""


def kind_of(criterion: Any) -> str:
    """Return the class of a criterion that steps stand for; empty for one that runs on the host."""
    kind = type(criterion)
    library = kind.__module__ == "transformers.generation.stopping_criteria"
    return kind.__name__ if library and kind.__name__ in ON_DEVICE else ""


def of_criteria(criteria: Any, kind: str) -> list[Any]:
    """Return the criteria of a kind."""
    return [criterion for criterion in criteria if kind_of(criterion) == kind]


class Stops:
    """Criteria that run on the host, called for each token as ``generate`` calls them.

    A row that one of them ends is cut behind that token. ``generate`` pads such a row only where
    end tokens are set; else it goes on until all rows have ended, and so does it here.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._seen = call, 0
        self._criteria = of_criteria(call.criteria, "")
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)
        self._ended = [False] * call.ids.shape[0]

    def all_ended(self, state: dict[str, Any]) -> bool:
        """Run the criteria for the new tokens; return whether they have ended the text."""
        if not self._criteria or all(self._ended):
            return bool(self._criteria)
        count, before = int(ready(state)), self._call.ids
        ids = torch.cat((before, state["text"][:, :count].to(before.device)), dim=-1)
        counts, finished = state["counts"].tolist(), state["finished"].tolist()
        for column in range(self._seen + 1, count + 1):
            now = ids[:, : before.shape[1] + column]
            done = torch.full((len(ids),), False, device=ids.device)
            for criterion in self._criteria:
                done = done | criterion(now, None)
            for row, ends in enumerate(done.tolist()):
                if ends and not self._ended[row] and self._pads:
                    self._cut(state, ids, row, column)
                    counts[row], finished[row] = min(counts[row], column), True
                self._ended[row] |= ends or (finished[row] and counts[row] <= column)
            if all(self._ended):
                state["counts"].clamp_(max=column)
                state["finished"].fill_(True)
                return True
        self._seen = count
        return False

    def _cut(self, state: dict[str, Any], ids: torch.Tensor, row: int, column: int) -> None:
        """End a row: what follows is padding."""
        state["counts"][row].clamp_(max=column)
        state["finished"][row] = True
        state["text"][row, column:] = state["pad"]
        ids[row, self._call.ids.shape[1] + column :] = state["pad"]


def _length_of(cache: Any) -> int:
    """Return how many positions a dynamic cache has seen; 0 where its layers have none."""
    own = getattr(cache, "self_attention_cache", cache)
    lengths = [
        layer.get_seq_length()
        for layer in own.layers
        if getattr(layer, "keys", None) is not None  # others share those of another layer
    ]
    return max((int(length) for length in lengths), default=0)


# ---------------------------------------------------------------- one text


class Text:
    """One call of ``generate`` that runs captured steps, of one token each."""

    def __init__(self, call: Call) -> None:
        self.call, self.model = call, call.model
        rows = call.ids.shape[0]
        self.source = decode_inputs.dynamic_cache(self.model)
        name = next(name for name in CACHES if call.kwargs.get(name) is not None)
        self.kwargs = {**call.kwargs, name: self.source}
        self.cross, mask = decode_inputs.encoder_length(self.model, self.kwargs)
        self.pads_encoder = mask is not None
        if mask is not None:
            self.kwargs["attention_mask"] = mask
        self.rows = rows
        longest = [one.max_length for one in of_criteria(call.criteria, "MaxLengthCriteria")]
        self.limit = min(longest, default=0) - call.ids.shape[1]  # new tokens
        if not longest:
            raise NotHeld("a text without a maximum length")
        # There transformers drops the cache, and runs the whole text with the other frequencies.
        point = getattr(self.model.config, "original_max_position_embeddings", None) or -1
        crosses = call.ids.shape[1] <= point < call.ids.shape[1] + self.limit
        if crosses and decode_inputs.follows_length(self.model):
            raise NotHeld(f"a text across position {point}, where frequencies of the model change")
        ends = [one.eos_token_id for one in of_criteria(call.criteria, "EosTokenCriteria")]
        self.ends = torch.cat([end.reshape(-1) for end in ends]) if ends else None
        self.returned: list[dict[str, torch.Tensor]] = []  # of rounds

    @property
    def sides(self) -> "tuple[Text, ...]":
        """The texts whose forwards are compiled."""
        return (self,)

    @property
    def returns(self) -> bool:
        """Whether ``generate`` returns more than tokens."""
        return bool(self.call.config.return_dict_in_generate)

    @property
    def listed(self) -> tuple[str, ...]:
        """What is returned of each step: scores, logits."""
        config, kinds = self.call.config, ("scores", "logits")
        wanted = [name for name in kinds if getattr(config, f"output_{name}")]
        return tuple(wanted) if self.returns else ()

    @property
    def needs_flag(self) -> bool:
        """Whether rows end before there is no room."""
        return self.ends is not None

    def steps(self, steps: int) -> int:
        """Return how many steps a round has."""
        return steps

    def run_prompt(self) -> None:
        """Run the prompt as ``generate`` does."""
        call, model = self.call, self.model
        self.outputs = model._prefill(call.ids, call.config, dict(self.kwargs))
        # Models may drop the cache that they are given, and make one.
        caches = [self.outputs[name] for name in CACHES if self.outputs.get(name) is not None]
        self.source = (*caches, self.source)[0]
        # A copy: the whole logits of the prompt may be large.
        self.logits = self.outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        self.device, self.vocabulary = self.logits.device, self.logits.shape[-1]
        # Layers without attention have no length; processors read the ids.
        self.past = max(_length_of(self.source), call.ids.shape[1])

    def prefill(self) -> None:
        """Run the prompt, and select the first token."""
        call = self.call
        self.run_prompt()
        self.prompt = Prompt(call.ids, self.vocabulary, self.device)
        scores = call.processors(call.ids, self.logits)
        self.add({"logits": self.logits[None], "scores": scores[None]})
        self.rules = next_token.rules_of(call.processors, self.prompt)
        self.invalid = torch.zeros((), dtype=torch.bool, device=self.device)
        first = {"invalid": self.invalid}
        self.first = next_token.selected(scores, first, call.samples)

    @property
    def needed(self) -> int:
        """The positions of the cache, and the columns of buffers, that the text needs at most."""
        return max(self.past + self.limit - 1, self.limit)

    @property
    def layout(self) -> tuple[Hashable, ...]:
        """What the layers of a cache have in common, beside the length."""
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.rows, self.device, self.model.dtype, cast, self.cross

    def key(self) -> Hashable:
        """Return the key of what is kept."""
        return *self.layout, threading.get_ident()

    def made_caches(self, length: int) -> dict[str, Any]:
        """Return empty caches, by their names in the state."""
        return {"cache": decode_inputs.static_cache(self.model, self.source, length, self.cross)}

    def fill(self, kept: Kept) -> None:
        """Copy what the prompt has left into the kept caches."""
        decode_inputs.fill(kept.caches["cache"], self.source)

    def describe(self, kept: Kept, name: str = "cache") -> None:
        """Set ``described``, the inputs of a step over a kept cache."""
        model, call, cache = self.model, self.call, kept.caches[name]
        kwargs = decode_inputs.with_mask(model, call.ids, dict(self.kwargs), self.past)
        ids, token = call.ids, self.first

        def of_next_token() -> dict[str, Any]:
            nonlocal ids, kwargs, token
            kwargs = model._update_model_kwargs_for_generation(
                self.outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder
            )
            kwargs |= {name: cache for name in CACHES if name in kwargs}
            ids = torch.cat((ids, token[:, None]), dim=-1)
            token = torch.where(token > 0, token - 1, 1)  # another one: no input may depend on it
            inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            return decode_inputs.of_one_token(dict(inputs))

        prepared = of_next_token()
        mask = kwargs.get(decode_inputs.mask_name(model))
        if mask is not None:
            if mask.dim() != 2:
                raise NotHeld(f"a mask of {mask.dim()} dimensions")
            mask = torch.nn.functional.pad(mask, (0, kept.length - mask.shape[1]), value=1)
        self.described = decode_inputs.described(
            model,
            prepared,
            of_next_token,
            mask,
            kept.advancing.setdefault(name, {}),
            self.cross if self.pads_encoder else 0,
        )

    def state(self, kept: Kept) -> dict[str, Any]:
        """Return the state of the steps, in kept buffers, after the first token."""
        rows, length, device = self.rows, kept.length, self.device
        ends = torch.empty(0, dtype=torch.long, device=device) if self.ends is None else self.ends
        pad = self.call.config._pad_token_tensor
        pad = torch.zeros((), dtype=torch.long) if pad is None else pad.reshape(())
        first = self.first
        finished = (first[:, None] == ends.to(device)).any(-1)
        values: dict[str, torch.Tensor] = {
            "token": first,
            "finished": finished,
            "invalid": self.invalid,
            "counts": torch.ones(rows, dtype=torch.long, device=device),
            "column": torch.ones(1, dtype=torch.long, device=device),
            "length": torch.tensor(self.call.ids.shape[1], device=device),
            "text": pad.to(device).expand(rows, length).clone(),
            "ends": ends.to(device),
            "pad": pad,
        }
        values["text"][:, 0] = first
        if next_token.reads_ids(self.call.processors):
            ids = self.prompt.ids[:, -length:]
            padding = (length - ids.shape[1], 0)
            values["ids"] = torch.nn.functional.pad(ids, padding, value=-1)
        state: dict[str, Any] = {
            name: kept.buffer(name, value.to(device)) for name, value in values.items()
        }
        state["inputs"] = self.inputs(kept)
        state["rules"] = [
            {name: kept.buffer((number, name), value) for name, value in rule.tensors.items()}
            for number, rule in enumerate(self.rules)
        ]
        state["frequencies"] = [decode_inputs.frequencies(side.model) for side in self.sides]
        return state | kept.caches

    def inputs(self, kept: Kept, name: str = "inputs") -> dict[str, torch.Tensor]:
        """Return the kept buffers of the inputs that are described."""
        tensors = self.described.tensors
        return {key: kept.buffer((name, key), value) for key, value in tensors.items()}

    def add(self, result: dict[str, torch.Tensor] | None) -> None:
        """Take what a round has returned, ``[steps, rows, vocabulary]``."""
        if result:
            self.returned.append({name: result[name] for name in self.listed})

    def forget_prefill(self) -> None:
        """Free what the prompt has left, and was copied."""
        self.outputs = self.logits = None
        if not self.returns:
            self.source = None
        self.kwargs.clear()

    def key_of_step(self) -> tuple[Hashable, ...]:
        """Return what is baked into a step."""
        rules = tuple((rule.key, tuple(rule.tensors)) for rule in self.rules)
        return self.described.key, rules, self.call.samples, self.ends is not None, self.listed

    def step(self, forwards: Sequence[Forward]) -> Callable[[dict[str, Any]], Any]:
        """Return the step of a loop: a token in, the next one out, in the tensors of the state.

        It returns what is listed of a step.

        Args:
            forwards: of the sides.
        """
        (forward,), rules, samples = forwards, self.rules, self.call.samples
        listed, model, build, advance = (
            self.listed,
            self.model,
            self.described.build,
            self.described.advance,
        )

        def decode_step(state: dict[str, Any]) -> dict[str, torch.Tensor]:
            token, inputs, finished = state["token"], state["inputs"], state["finished"]
            state["length"].add_(1)
            if "ids" in state:
                state["ids"].copy_(torch.cat((state["ids"][:, 1:], token[:, None]), dim=-1))
            logits = forward(model, build(inputs, token[:, None], state["cache"]))[:, -1]
            logits = logits.to(copy=True, dtype=torch.float32)
            pairs = list(zip(rules, state["rules"], strict=True))
            scores = next_token.processed(logits, pairs, state)
            following = next_token.selected(scores, state, samples)
            following = torch.where(finished, state["pad"], following)
            token.copy_(following)
            state["text"].index_copy_(1, state["column"], following[:, None])
            state["column"].add_(1)
            state["counts"].add_(finished.logical_not())
            # `torch.isin` sorts, and waits for the device, where there are many end tokens.
            finished.logical_or_((following[:, None] == state["ends"]).any(-1))
            for name in advance:
                inputs[name].add_(1)
            return {name: {"scores": scores, "logits": logits}[name] for name in listed}

        return decode_step

    def result(self, kept: Kept, state: dict[str, Any]) -> Any:
        """Return what ``generate`` returns, to where the last row has ended."""
        count, invalid = torch.stack((ready(state), state["invalid"].long())).tolist()
        if invalid:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        new = state["text"][:, :count].to(self.call.ids.device)
        tokens = torch.cat((self.call.ids, new), dim=-1)
        return self._outputs(kept, tokens, count) if self.returns else tokens

    def _outputs(self, kept: Kept, tokens: torch.Tensor, count: int) -> Any:
        from transformers.generation import utils

        encodes = self.model.config.is_encoder_decoder
        kind: Any = utils.GenerateDecoderOnlyOutput
        if encodes:
            kind = utils.GenerateEncoderDecoderOutput
        lists = {
            name: tuple(itertools.chain(*(one[name] for one in self.returned)))[:count]
            for name in self.listed
        }
        decode_inputs.extend(self.source, kept.caches["cache"], self.past + count - 1)
        name = next(name for name in CACHES if name in inspect.signature(kind).parameters)
        return kind(sequences=tokens, **lists, **{name: self.source})


def ready(state: dict[str, Any]) -> torch.Tensor:
    """Return how many new tokens all rows have; those that have ended have as many as others."""
    counts = state["counts"]
    return torch.where(state["finished"], counts.max(), counts).min()


def finished(state: dict[str, Any]) -> torch.Tensor:
    """Return which rows have ended."""
    return state["finished"]  # type: ignore[no-any-return]
