"""``custom_generate`` of ``transformers``: the decoding loop as replays of a graph.

:data:`generate`, or :class:`Generate` with settings, is a callable for
``model.generate(..., custom_generate=generate)``, which prepares inputs, processors and criteria,
and then calls it in place of its own loop:

1. :func:`_own_way` decides whether ``generate``'s own loop has to run; it is counted.
2. The prefill runs as in ``generate``, and its cache is copied into a kept static one.
3. ``prepare_inputs_for_generation`` tells what a step gets (``decode_inputs.py``), and the logits
   processors how it selects a token (``next_token.py``).
4. :func:`cgcompile.loop` runs the steps; a text ends where all rows have ended.

The rule: what one call passes is copied into buffers that the graphs read, or is a part of the key
of a step; a kept object refers to the model weakly.
"""

import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch

from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig
from cgcompile.errors import ConfigError, GuardError, LoopStateError
from cgcompile.graphs.capture import postponed_capture
from cgcompile.graphs.reads import Transparent
from cgcompile.graphs.steps import refuse_strict
from cgcompile.graphs.timeline import Timeline
from cgcompile.integrations import decode_inputs, next_token
from cgcompile.integrations.decode_inputs import CACHES, Described, NotHeld
from cgcompile.integrations.next_token import Prompt, Rule
from cgcompile.loops import loop
from cgcompile.reasons import Counters, Fallback, Reason
from cgcompile.settings import require
from cgcompile.torch_compat import torch_ops

__all__ = ["Generate", "generate"]

_LOOPS = 8  # steps of a kept cache
_FORWARDS = 32  # compiled for a model
_SHORTEST = 1024  # positions of a cache, where the model has as many


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the last position, ``[rows, vocabulary]``; what is compiled."""
    logits: torch.Tensor = model(**inputs, return_dict=True).logits[:, -1]
    return logits


class _Forward:
    """``_logits`` compiled, which tells what of it has run.

    A captured step repeats what Dynamo chose by its guards. So they are evaluated once for each
    text, by a step that runs plain, and a graph serves texts for which the same graphs ran.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._numbers, self._here = backend, itertools.count(), threading.local()
        # With code of its own: Dynamo limits compilations by code.
        function = types.FunctionType(_logits.__code__.replace(), _logits.__globals__, "logits")
        self._call: Callable[..., torch.Tensor] = torch.compile(
            function, backend=self._compile, dynamic=False
        )

    def __call__(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._here.ran = []
        return self._call(model, inputs)

    def repeated(self, ran: tuple[int, ...], model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Call it where the same graphs must run as in another step of the text."""
        logits = self(model, inputs)
        if self.ran != ran:
            raise NotHeld("a step whose compiled code changes from token to token")
        return logits

    @property
    def ran(self) -> tuple[int, ...]:
        """The graphs that ran in the last call of this thread."""
        return tuple(self._here.ran)

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        number, compiled, here = next(self._numbers), self._backend(graph, inputs), self._here

        def run(*args: Any) -> Any:
            here.ran.append(number)
            return compiled(*args)

        return run


def _is_compiled(model: Any) -> bool:
    """Return whether a model may run compiled code, whose guards no replay evaluates."""
    own = [vars(module).get("forward") for module in model.modules()]
    return torch_ops.holds_compiled_code(model) or any(isinstance(f, Transparent) for f in own)


# ---------------------------------------------------------------- what is kept


@dataclass(eq=False)
class _Kept:
    """A cache with the buffers and steps that read it, of one number of rows.

    Attributes:
        advancing: which inputs advance, by the layout of the inputs.
        loops: by what is baked into a step.
        attributes: tensors that the modules of the model have beside weights, at the last capture.
        held: buffers of those that calls replace, such as the offsets of positions of Qwen-VL.
        used: the number of the last call.
    """

    cache: Any
    length: int
    buffers: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    advancing: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    loops: dict[Hashable, Any] = field(default_factory=dict)
    attributes: "dict[_Attribute, torch.Tensor]" = field(default_factory=dict)
    held: "dict[_Attribute, torch.Tensor]" = field(default_factory=dict)
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
        now = _tensors_beside_weights(model)
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
class _Call:
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


# ---------------------------------------------------------------- what has to run in the own loop


def _is_sharded(model: Any) -> bool:
    """Return whether ranks have to run the same number of steps, as ``generate`` decides it."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_world_size() == 1:
        return False
    is_zero3: Any = is_deepspeed_zero3_enabled
    return bool(is_zero3() or is_fsdp_managed_module(model))


def _why_own_way(call: _Call) -> str:
    """Return why ``generate``'s own loop has to run; empty if a captured step can."""
    from transformers.generation.configuration_utils import GenerationMode

    config, model = call.config, call.model
    mode = config.get_generation_mode()
    caches = [call.kwargs[name] for name in CACHES if call.kwargs.get(name) is not None]
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    attention = str(getattr(model.config, "_attn_implementation", ""))
    kind = config.cache_implementation
    reasons = {
        f"decoding of kind {mode.value}": mode
        not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        "a model of several ranks": _is_sharded(model),
        "a model on several devices": len(devices) > 1,
        "return_dict_in_generate": config.return_dict_in_generate,
        "an assistant": config.is_assistant,
        "use_cache=False": not call.kwargs.get("use_cache"),
        "a model without a cache of transformers": not caches,
        "a cache of yours": any(getattr(cache, "_is_user_defined", False) for cache in caches),
        f"cache_implementation={kind!r}": kind not in (None, "dynamic", "static", "hybrid"),
        "a compile_config": config.compile_config is not None,
        f"attention of kind {attention}": attention not in ("sdpa", "eager"),
        "prompts of several dimensions": call.ids.dim() != 2,
        "a prompt on another device than the model": call.ids.device != model.device,
        "a model that transformers cannot compile with a static cache": not _takes_static_cache(
            model
        ),
    }
    for why, holds in reasons.items():
        if holds:
            return why
    return _criterion_refused(call.criteria) or next_token.refusal(call.processors)


def _takes_static_cache(model: Any) -> bool:
    """Return whether masks and positions of a model are right over a static cache.

    Others index tables by the length of the cache, which is then that of the longest text. States
    of layers without attention have one size in any cache.
    """
    if model._can_compile_fullgraph:
        return True
    layers = getattr(decode_inputs.dynamic_cache(model), "layers", ())
    without_attention = [hasattr(x, "conv_states") and not hasattr(x, "keys") for x in layers]
    return bool(without_attention) and all(without_attention)


_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria")


def _criterion_refused(criteria: Any) -> str:
    for criterion in criteria:
        kind = type(criterion)
        library = kind.__module__ == "transformers.generation.stopping_criteria"
        if not library or kind.__name__ not in _CRITERIA:
            return f"the stopping criterion {kind.__name__}"
    return ""


def _of_criteria(criteria: Any, name: str) -> list[Any]:
    """Return an attribute of all criteria that have it."""
    return [getattr(criterion, name) for criterion in criteria if hasattr(criterion, name)]


# ---------------------------------------------------------------- one text


class _Text:
    """One call of ``generate`` that runs captured steps."""

    def __init__(self, call: _Call) -> None:
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
        longest = _of_criteria(call.criteria, "max_length")
        self.limit = min(longest, default=0) - call.ids.shape[1]  # new tokens
        if not longest:
            raise NotHeld("a text without a maximum length")
        ends = _of_criteria(call.criteria, "eos_token_id")
        self.ends = torch.cat([end.reshape(-1) for end in ends]) if ends else None

    def prefill(self) -> None:
        """Run the prompt, and select the first token."""
        call, model = self.call, self.model
        self.outputs = model._prefill(call.ids, call.config, dict(self.kwargs))
        # A copy: the whole logits of the prompt may be large.
        logits = self.outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        self.device, self.vocabulary = logits.device, logits.shape[-1]
        # Layers without attention have no length; processors read the ids.
        self.past = max(_length_of(self.source), call.ids.shape[1])
        self.prompt = Prompt(call.ids, self.vocabulary, self.device)
        scores = call.processors(call.ids, logits)
        self.rules = next_token.rules_of(call.processors, self.prompt)
        self.invalid = torch.zeros((), dtype=torch.bool, device=self.device)
        first = {"invalid": self.invalid}
        self.first = next_token.selected(scores, (), first, call.samples)

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
        """Return the key of the kept cache."""
        return *self.layout, threading.get_ident()

    def described(self, kept: _Kept) -> Described:
        """Return the inputs of a step over a kept cache."""
        model, call, cache = self.model, self.call, kept.cache
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
        return decode_inputs.described(
            model,
            prepared,
            of_next_token,
            mask,
            kept.advancing,
            self.cross if self.pads_encoder else 0,
        )

    def state(self, kept: _Kept, described: Described) -> dict[str, Any]:
        """Return the state of the steps, in kept buffers, after the first token."""
        rows, length, device = self.rows, kept.length, self.device
        pad = self.call.config._pad_token_tensor
        ends = torch.empty(0, dtype=torch.long, device=device) if self.ends is None else self.ends
        first = self.first
        finished = (first[:, None] == ends.to(device)).any(-1)
        values: dict[str, torch.Tensor] = {
            "token": first,
            "finished": finished,
            "invalid": self.invalid,
            "counts": torch.ones(rows, dtype=torch.long, device=device),
            "column": torch.ones(1, dtype=torch.long, device=device),
            "length": torch.tensor(self.call.ids.shape[1], device=device),
            "text": torch.zeros((rows, length), dtype=torch.long, device=device),
            "ends": ends.to(device),
            "pad": torch.zeros((), dtype=torch.long) if pad is None else pad.reshape(()),
        }
        values["text"][:, 0] = first
        if next_token.reads_ids(self.call.processors):
            ids = self.prompt.ids[:, -length:]
            padding = (length - ids.shape[1], 0)
            values["ids"] = torch.nn.functional.pad(ids, padding, value=-1)
        state: dict[str, Any] = {
            name: kept.buffer(name, value.to(device)) for name, value in values.items()
        }
        state["inputs"] = {
            name: kept.buffer(("inputs", name), value) for name, value in described.tensors.items()
        }
        state["rules"] = [
            {name: kept.buffer((number, name), value) for name, value in rule.tensors.items()}
            for number, rule in enumerate(self.rules)
        ]
        return state | {"cache": kept.cache}

    def forget_prefill(self) -> None:
        """Free the dynamic cache, whose contents are copied."""
        self.source = self.outputs = None
        self.kwargs.clear()

    def key_of_step(self, described: Described) -> tuple[Hashable, ...]:
        """Return what is baked into a step."""
        rules = tuple((rule.key, tuple(rule.tensors)) for rule in self.rules)
        return described.key, rules, self.call.samples, self.ends is not None

    def result(self, state: dict[str, Any]) -> torch.Tensor:
        """Return the prompt and the new tokens, to where the last row has ended."""
        count, invalid = torch.stack((state["counts"].max(), state["invalid"].long())).tolist()
        if invalid:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        new = state["text"][:, :count].to(self.call.ids.device)
        return torch.cat((self.call.ids, new), dim=-1)


def _finished(state: dict[str, Any]) -> torch.Tensor:
    return state["finished"]  # type: ignore[no-any-return]


def _step_of(
    model: Any, forward: Callable[..., Any], described: Described, rules: list[Rule], samples: bool
) -> Callable[[dict[str, Any]], None]:
    """Return the step of a loop: a token in, the next one out, all in the tensors of the state."""
    build, advance = described.build, described.advance

    def decode_step(state: dict[str, Any]) -> None:
        token, inputs, finished = state["token"], state["inputs"], state["finished"]
        state["length"].add_(1)
        if "ids" in state:
            state["ids"].copy_(torch.cat((state["ids"][:, 1:], token[:, None]), dim=-1))
        logits = forward(model, build(inputs, token, state["cache"]))
        scores = logits.to(copy=True, dtype=torch.float32)
        pairs = list(zip(rules, state["rules"], strict=True))
        following = next_token.selected(scores, pairs, state, samples)
        following = torch.where(finished, state["pad"], following)
        token.copy_(following)
        state["text"].index_copy_(1, state["column"], following[:, None])
        state["column"].add_(1)
        state["counts"].add_(finished.logical_not())
        # `torch.isin` sorts, and waits for the device, where there are many end tokens.
        finished.logical_or_((following[:, None] == state["ends"]).any(-1))
        for name in advance:
            inputs[name].add_(1)

    return decode_step


# ---------------------------------------------------------------- the callable


class _Keeper:
    """The kept caches of a model, which refers to it: they live as long as the model.

    A copy of the model has none.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.kept = weakref.WeakKeyDictionary[Generate, dict[Hashable, _Kept]]()
        self.refused = weakref.WeakKeyDictionary[Generate, str]()  # why its steps are not captured
        self.forwards = weakref.WeakKeyDictionary[Generate, dict[Hashable, Any]]()  # compiled

    @classmethod
    def of(cls, model: Any) -> "_Keeper":
        keeper = vars(model).get(_KEEPER)
        if not isinstance(keeper, _Keeper) or keeper._model() is not model:
            keeper = vars(model)[_KEEPER] = cls(model)
        return keeper

    def __reduce__(self) -> Any:
        return dict, ()  # which nothing but Python has to load


_KEEPER = "_cgcompile_generate"


class Generate:
    """The loop of ``model.generate``, as replays of a graph of one step.

    Pass it as ``custom_generate``; :data:`generate` is one with the defaults. ``generate`` prepares
    inputs, processors and criteria as always. The prompt then runs as in ``generate``; the steps
    run over a static cache that is kept for later calls, with the forward of the model compiled by
    cgcompile on CUDA. What a graph cannot hold (beams, processors that are not known, a cache of
    yours) runs in ``generate``'s own loop, counted as ``own_loop``.

    Args:
        steps: how many steps run between two reads of whether all rows have ended. Up to
            ``2 * steps - 1`` run after the last one that was needed.
        backend: compiles the forward; left out: one with the default settings on CUDA, and the
            forward as it is on other devices. A model that is compiled already is compiled anew, as
            a part of the step.
        stream: a streamer of ``transformers``, as ``generate`` passes none to a custom loop. It
            gets the tokens after each round.
        caches: how many caches are kept for a model, the last ones used. There is one for each
            number of rows and thread, as long as the longest text so far, and for each length of
            an encoder's states.
        max_cache_len: how many positions a cache has at least; a longer text gets a longer one, for
            which the forward is compiled and the step captured again. Left out: 1024, or what the
            model has.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> sizes |= {"num_attention_heads": 2, "vocab_size": 64, "eos_token_id": None}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> ids = torch.randint(0, 64, (1, 5))
        >>> text = model.generate(
        ...     ids, do_sample=False, max_new_tokens=8, custom_generate=Generate(steps=4)
        ... )
        >>> torch.equal(text, model.generate(ids, do_sample=False, max_new_tokens=8))
        True
    """

    def __init__(
        self,
        steps: int = 8,
        *,
        backend: Backend | None = None,
        stream: Any = None,
        caches: int = 4,
        max_cache_len: int | None = None,
    ) -> None:
        require(type(steps) is int and steps > 0, "steps", "Generate", steps, "at least 1")
        require(type(caches) is int and caches > 0, "caches", "Generate", caches, "at least 1")
        least = max_cache_len
        good = least is None or (type(least) is int and least > 0)
        require(good, "max_cache_len", "Generate", least, "at least 1")
        self.steps, self.stream, self.caches = steps, stream, caches
        self.max_cache_len = max_cache_len
        self._given = backend is not None
        self._backend = backend
        self._keepers: weakref.WeakSet[_Keeper] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._calls = 0

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate; ``model.generate`` calls it.

        Raises:
            DispatchError: with ``on_fallback="raise"``, ``generate``'s own loop has to run.
            BaseException: what the model raises.
        """
        call = _Call(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        keeper = _Keeper.of(model)
        self._keepers.add(keeper)
        if self.stream is not None:
            self.stream.put(call.ids.cpu())
        why = keeper.refused.get(self) or _why_own_way(call)
        if not why:
            drawn = call.random_state()
            try:
                # In one mode, whatever that of the caller: a graph is of one.
                with torch.inference_mode(False), torch.no_grad():
                    return self._run(call)
            except NotHeld as refused:
                why = str(refused)
            except LoopStateError as error:
                why = f"a step that changes more than its state: {str(error).splitlines()[0]}"
                keeper.refused[self] = why
            call.set_random_state(drawn)
        return self._own_way(call, why)

    @cached_property
    def _config(self) -> CompilationConfig:
        return CompilationConfig() if self._backend is None else self._backend.config

    @cached_property
    def _timeline(self) -> Timeline:
        return Timeline(self._config.warn_fallbacks)

    @property
    def counters(self) -> Counters:
        """What calls did so far; a copy.

        A call of ``generate`` counts once: as a capture if a step was captured in it, as a replay
        if all but its first one or two tokens were replayed, else as plain.
        """
        return self._timeline.counters

    @property
    def backend(self) -> Backend | None:
        """What compiles the forward; None before the first call that compiles it."""
        return self._backend

    def release(self) -> None:
        """Drop all kept caches and graphs, and their memory. The next call makes them again."""
        for keeper in list(self._keepers):
            for kept in keeper.kept.pop(self, {}).values():
                kept.release()
            keeper.refused.pop(self, None)
            keeper.forwards.pop(self, None)
        if self._backend is not None and not self._given:
            self._backend.release()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, also in another process, keeps nothing yet.
        settings = {name: getattr(self, name) for name in signature(Generate).parameters}
        return settings if self._given else {**settings, "backend": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Generate.__init__(self, **state)

    def __repr__(self) -> str:
        number = sum(len(keeper.kept.get(self, ())) for keeper in list(self._keepers))
        return f"Generate({self.steps} steps, {number} kept caches)"

    # -------------------------------------------------------------- the two ways

    def _own_way(self, call: _Call, why: str) -> Any:
        fallback = Fallback(Reason.OWN_LOOP, why)
        refuse_strict(self._config.strict, "generate", fallback)
        self._timeline.plain(fallback, f"{call.ids.shape[0]} rows")
        more: dict[str, Any] = {"synced_gpus": True} if _is_sharded(call.model) else {}
        if self.stream is not None:
            more["streamer"] = self.stream
        return call.own_way(**more)

    def _run(self, call: _Call) -> torch.Tensor:
        text = _Text(call)
        text.prefill()
        kept = self._taken(text)
        try:
            described = text.described(kept)
            decode_inputs.fill(kept.cache, text.source)
            state = text.state(kept, described)
            text.forget_prefill()
            with call.model._optimize_model_for_decode():
                self._decode(text, kept, described, state)
            return text.result(state)
        finally:
            kept.busy.release()

    def _decode(
        self, text: "_Text", kept: _Kept, described: Described, state: dict[str, Any]
    ) -> None:
        """Run steps to the end of the text."""
        call, shown = text.call, 0
        clocks = [
            (criterion.initial_timestamp, criterion.max_time)
            for criterion in call.criteria
            if hasattr(criterion, "max_time")
        ]
        forward = self._forward(text, (*text.layout, kept.length, described.key))
        step = _step_of(text.model, forward, described, text.rules, call.samples)
        left, ran = text.limit - 1, tuple[int, ...]()
        if isinstance(forward, _Forward) and left > 0:
            with _held(kept), postponed_capture():
                step(state)  # evaluates the guards of Dynamo
            left, ran = left - 1, forward.ran
            same = partial(forward.repeated, ran)
            step = _step_of(text.model, same, described, text.rules, call.samples)
        steps = self._loop(kept, (*text.key_of_step(described), ran), step, text.ends is not None)
        before = steps.counters
        for _ in _rounds(text.model, kept, steps, state, left):
            shown = self._show(state, shown)
            if any(time.time() - begin > longest for begin, longest in clocks):
                break
        self._show(state, shown)
        if self.stream is not None:
            self.stream.end()
        self._count(before, steps.counters)

    def _show(self, state: dict[str, Any], shown: int) -> int:
        """Pass new tokens to the streamer; return how many it has."""
        if self.stream is None:
            return 0
        count = int(state["counts"].max())
        for tokens in state["text"][:, shown:count].cpu().unbind(1):
            self.stream.put(tokens)
        return count

    def _count(self, before: Counters, after: Counters) -> None:
        plain = after.plain - before.plain
        plain.pop(Reason.WARMING, None)
        if plain:
            reason = next(iter(plain))
            self._timeline.plain(Fallback(reason, after.details[reason]), "")
        elif after.captures > before.captures:
            self._timeline.captured()
        else:
            with self._lock:
                self._timeline.replays += 1

    # -------------------------------------------------------------- what is kept

    def _taken(self, text: "_Text") -> _Kept:
        """Return the kept cache of a text, busy; make one if there is none that is long enough."""
        keeper = _Keeper.of(text.model)
        with self._lock:
            self._calls += 1
            all_kept = keeper.kept.setdefault(self, {})
            kept = all_kept.get(text.key())
            if kept is not None and kept.length < text.needed:
                del all_kept[text.key()]
                _release(kept)
                kept = None
            if kept is None:
                idle = [key for key, other in all_kept.items() if not other.busy.locked()]
                while len(all_kept) >= self.caches and idle:
                    oldest = min(idle, key=lambda key: all_kept[key].used)
                    idle.remove(oldest)
                    _release(all_kept.pop(oldest))
                length = _rounded(text.needed, text.model, self.max_cache_len)
                cache = decode_inputs.static_cache(text.model, text.source, length, text.cross)
                kept = all_kept[text.key()] = _Kept(cache, length)
            kept.used = self._calls
            if not kept.busy.acquire(blocking=False):
                raise NotHeld("a call of generate inside of another one")
        return kept

    def _loop(self, kept: _Kept, key: Hashable, step: Any, ends: bool) -> Any:
        """Return the loop of a step, made at the first call that needs it."""
        if key not in kept.loops:
            while len(kept.loops) >= _LOOPS:
                kept.loops.pop(next(iter(kept.loops))).release()
            until = _finished if ends else None
            kept.loops[key] = loop(step, steps=self.steps, until=until, config=self._config)
            # One call at a time has the kept cache; a later thread may have the id of this one.
            kept.loops[key].wrapper.allow_threads()
        return kept.loops[key]

    def _forward(self, text: "_Text", key: Hashable) -> Any:
        """Return the forward of a step, compiled where due; caches of one layout share it."""
        due = self._given or text.device.type == "cuda"
        if not due or text.call.config.disable_compile:
            if _is_compiled(text.model):
                raise NotHeld("a compiled model that is not to be compiled here")
            return _logits
        with self._lock:
            if self._backend is None:
                self._backend = Backend()
            forwards = _Keeper.of(text.model).forwards.setdefault(self, {})
            if key not in forwards:
                while len(forwards) >= _FORWARDS:
                    forwards.pop(next(iter(forwards)))
                forwards[key] = _Forward(self._backend)
            return forwards[key]


def _release(kept: _Kept) -> None:
    if not kept.busy.locked():  # else it goes with the call that uses it
        kept.release()


def _rounds(
    model: Any, kept: _Kept, steps: Any, state: dict[str, Any], limit: int
) -> Iterator[Any]:
    """Run the rounds of a loop; capture again if the model has changed since."""
    if not kept.attributes:
        kept.attributes = _tensors_beside_weights(model)
    for captures_again in (True, False):
        with _held(kept):
            rounds = steps.rounds(state, limit=limit)
            try:
                first = next(rounds, None)
            except GuardError:  # nothing has run
                if not captures_again:
                    raise
            else:
                yield first
                yield from rounds
                return
        kept.hold_replaced(model)
        steps.release()


_Attribute = tuple[torch.nn.Module, str]


def _tensors_beside_weights(model: torch.nn.Module) -> dict[_Attribute, torch.Tensor]:
    """Return the tensors that modules have as plain attributes."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def _held(kept: _Kept) -> Iterator[None]:
    """Put kept tensors, with the same values, in place of attributes that each call replaces."""
    before = {}
    for (module, name), buffer in kept.held.items():
        value = vars(module).get(name)
        if (
            isinstance(value, torch.Tensor)
            and value.shape == buffer.shape
            and value.dtype == buffer.dtype
        ):
            before[module, name] = value
            vars(module)[name] = buffer.copy_(value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            vars(module)[name] = value


def _rounded(needed: int, model: Any, least: int | None) -> int:
    """Return the length of a cache: few lengths, so that few are compiled and captured."""
    if least is not None and needed <= least:
        return least
    length = max(_SHORTEST, 1 << (needed - 1).bit_length())
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return max(needed, min(length, longest or length))


def _length_of(cache: Any) -> int:
    """Return how many positions a dynamic cache has seen; 0 where its layers have none."""
    own = getattr(cache, "self_attention_cache", cache)
    lengths = [
        layer.get_seq_length()
        for layer in own.layers
        if getattr(layer, "keys", None) is not None  # others share those of another layer
    ]
    return max((int(length) for length in lengths), default=0)


generate = Generate()
"""A :class:`Generate` with the default settings."""
