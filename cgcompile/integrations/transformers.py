"""``custom_generate`` of ``transformers``: the decoding loop as replays of a graph.

:data:`generate`, or :class:`Generate` with settings, is a callable for
``model.generate(..., custom_generate=generate)``, which prepares inputs, processors and criteria,
and then calls it in place of its own loop:

1. :func:`_why_own_way` decides whether ``generate``'s own loop has to run; it is counted.
2. The prefill runs as in ``generate``, and its cache is copied into a kept static one.
3. ``prepare_inputs_for_generation`` tells what a step gets (``decode_inputs.py``), and the logits
   processors how it selects a token (``next_token.py``).
4. :func:`cgcompile.loop` runs the steps; a text ends where all rows have ended.

The rule: an argument of ``generate`` is copied into a buffer that the graphs read, or part of the
key of a step; a kept object refers to the model weakly.
"""

import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch

from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig
from cgcompile.errors import GuardError, LoopStateError
from cgcompile.graphs.capture import postponed_capture
from cgcompile.graphs.reads import Transparent
from cgcompile.graphs.steps import refuse_strict
from cgcompile.graphs.timeline import Timeline
from cgcompile.integrations import decode_inputs, next_token
from cgcompile.integrations.decode_inputs import CACHES, NotHeld
from cgcompile.integrations.drafts import DraftedText
from cgcompile.integrations.texts import (
    Call,
    Kept,
    Stops,
    Text,
    finished,
    of_criteria,
    ready,
    tensors_beside_weights,
)
from cgcompile.loops import loop
from cgcompile.reasons import Counters, Fallback, Reason
from cgcompile.settings import require
from cgcompile.torch_compat import torch_ops

__all__ = ["Generate", "generate"]

_LOOPS = 8  # steps of a kept cache
_FORWARDS = 32  # compiled for a model
_SHORTEST = 1024  # positions of a cache, where the model has as many


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits, ``[rows, tokens, vocabulary]``; what is compiled."""
    logits: torch.Tensor = model(**inputs, return_dict=True).logits
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


def _why_own_way(call: Call) -> str:
    """Return why ``generate``'s own loop has to run; empty if a captured step can."""
    from transformers.generation.configuration_utils import GenerationMode

    config, model = call.config, call.model
    mode = config.get_generation_mode()
    caches = [call.kwargs[name] for name in CACHES if call.kwargs.get(name) is not None]
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    attention = str(getattr(model.config, "_attn_implementation", ""))
    kind, static = config.cache_implementation, decode_inputs.takes_static_cache(model)
    reasons = {
        f"decoding of kind {mode.value}": mode
        not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        "a model of several ranks": _is_sharded(model),
        "a model on several devices": len(devices) > 1,
        **_returns_refused(call),
        "an assistant": config.is_assistant,
        "use_cache=False": not call.kwargs.get("use_cache"),
        "a model without a cache of transformers": not caches,
        "a cache of yours": any(getattr(cache, "_is_user_defined", False) for cache in caches),
        f"cache_implementation={kind!r}": kind not in (None, "dynamic", "static", "hybrid"),
        "a compile_config": config.compile_config is not None,
        f"attention of kind {attention}": attention not in ("sdpa", "eager"),
        "prompts of several dimensions": call.ids.dim() != 2,
        "a prompt on another device than the model": call.ids.device != model.device,
        "a model that transformers cannot compile with a static cache": not static,
    }
    for why, holds in reasons.items():
        if holds:
            return why
    return next_token.refusal(call.processors)


def _returns_refused(call: Call) -> dict[str, bool]:
    """Return what of ``return_dict_in_generate`` needs the own loop, and whether it is wanted."""
    config, returns = call.config, call.config.return_dict_in_generate
    layers = getattr(decode_inputs.dynamic_cache(call.model), "layers", ()) if returns else ()
    return {
        "output_attentions": returns and config.output_attentions,
        "output_hidden_states": returns and config.output_hidden_states,
        "return_dict_in_generate with a criterion of yours": returns
        and bool(of_criteria(call.criteria, "")),
        "return_dict_in_generate of layers without attention": any(
            hasattr(layer, "conv_states") for layer in layers
        ),
    }


# ---------------------------------------------------------------- the callable


class _Keeper:
    """The kept caches of a model, which refers to it: they live as long as the model.

    A copy of the model has none.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.kept = weakref.WeakKeyDictionary[Generate, dict[Hashable, Kept]]()
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
        draft: a small model with the vocabulary of the model, which proposes tokens that the model
            then checks with one forward; ``generate`` passes no ``assistant_model`` to a custom
            loop. The tokens are those without it, and sampled ones have the same distribution.
        draft_tokens: how many tokens it proposes at once.

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
        draft: Any = None,
        draft_tokens: int = 4,
    ) -> None:
        numbers = {"steps": steps, "caches": caches, "draft_tokens": draft_tokens}
        for name, number in numbers.items():
            require(type(number) is int and number > 0, name, "Generate", number, "at least 1")
        least = max_cache_len
        good = least is None or (type(least) is int and least > 0)
        require(good, "max_cache_len", "Generate", least, "at least 1")
        self.steps, self.stream, self.caches = steps, stream, caches
        self.max_cache_len, self.draft, self.draft_tokens = max_cache_len, draft, draft_tokens
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
        call = Call(
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

    def _own_way(self, call: Call, why: str) -> Any:
        fallback = Fallback(Reason.OWN_LOOP, why)
        refuse_strict(self._config.strict, "generate", fallback)
        self._timeline.plain(fallback, f"{call.ids.shape[0]} rows")
        more: dict[str, Any] = {"synced_gpus": True} if _is_sharded(call.model) else {}
        if self.stream is not None:
            more["streamer"] = self.stream
        return call.own_way(**more)

    def _run(self, call: Call) -> Any:
        text = Text(call)
        if self.draft is not None:
            text = DraftedText(call, self.draft, self.draft_tokens)
        text.prefill()
        kept = self._taken(text)
        try:
            text.fill(kept)  # inputs may depend on the length of the cache
            text.describe(kept)
            state = text.state(kept)
            text.forget_prefill()
            with call.model._optimize_model_for_decode():
                self._decode(text, kept, state)
            return text.result(kept, state)
        finally:
            kept.busy.release()

    def _decode(self, text: Text, kept: Kept, state: dict[str, Any]) -> None:
        """Run steps to the end of the text."""
        call, shown, stops = text.call, 0, Stops(text.call)
        clocks = [
            (criterion.initial_timestamp, criterion.max_time)
            for criterion in of_criteria(call.criteria, "MaxTimeCriteria")
        ]
        forwards = [
            self._forward(side, (*text.layout, kept.length, side.described.key))
            for side in text.sides
        ]
        step = text.step(forwards)
        left, ran = text.limit - 1, tuple[Any, ...]()
        if isinstance(forwards[0], _Forward) and left > 0:
            with _held(kept), postponed_capture():
                first = step(state)  # evaluates the guards of Dynamo
                text.add(first and {name: value[None] for name, value in first.items()})
            left, ran = left - 1, tuple(forward.ran for forward in forwards)
            step = text.step([partial(forward.repeated, forward.ran) for forward in forwards])
        steps = self._loop(text, kept, ran, step)
        before = steps.counters
        if stops.all_ended(state):
            left = 0
        for result in _rounds(text.model, kept, steps, state, left):
            text.add(result)
            has_ended = stops.all_ended(state)
            shown = self._show(state, shown)
            if has_ended or any(time.time() - begin > longest for begin, longest in clocks):
                break
        self._show(state, shown)
        if self.stream is not None:
            self.stream.end()
        self._count(before, steps.counters)

    def _show(self, state: dict[str, Any], shown: int) -> int:
        """Pass new tokens to the streamer; return how many it has."""
        if self.stream is None:
            return 0
        count = int(ready(state))
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

    def _taken(self, text: Text) -> Kept:
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
                kept = all_kept[text.key()] = Kept(text.made_caches(length), length)
            kept.used = self._calls
            if not kept.busy.acquire(blocking=False):
                raise NotHeld("a call of generate inside of another one")
        return kept

    def _loop(self, text: Text, kept: Kept, ran: tuple[Any, ...], step: Any) -> Any:
        """Return the loop of a step, made at the first call that needs it."""
        key = *text.key_of_step(), ran
        if key not in kept.loops:
            while len(kept.loops) >= _LOOPS:
                kept.loops.pop(next(iter(kept.loops))).release()
            until = finished if text.needs_flag else None
            steps = text.steps(self.steps)
            kept.loops[key] = loop(step, steps=steps, until=until, config=self._config)
            # One call at a time has the kept cache; a later thread may have the id of this one.
            kept.loops[key].wrapper.allow_threads()
        return kept.loops[key]

    def _forward(self, text: Text, key: Hashable) -> Any:
        """Return the forward of a step, compiled where due; caches of one layout share it."""
        due = self._given or text.device.type == "cuda"
        if not due or text.call.config.disable_compile:
            if _is_compiled(text.model):
                raise NotHeld("a compiled model that is not to be compiled here")
            return _logits
        with self._lock:
            if self._backend is None:
                self._backend = Backend()
            keeper = _Keeper.of(text.model)
            self._keepers.add(keeper)  # of a draft model
            forwards = keeper.forwards.setdefault(self, {})
            if key not in forwards:
                while len(forwards) >= _FORWARDS:
                    forwards.pop(next(iter(forwards)))
                forwards[key] = _Forward(self._backend)
            return forwards[key]


def _release(kept: Kept) -> None:
    if not kept.busy.locked():  # else it goes with the call that uses it
        kept.release()


def _rounds(model: Any, kept: Kept, steps: Any, state: dict[str, Any], limit: int) -> Iterator[Any]:
    """Run the rounds of a loop; capture again if the model has changed since."""
    if not kept.attributes:
        kept.attributes = tensors_beside_weights(model)
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


@contextmanager
def _held(kept: Kept) -> Iterator[None]:
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


generate = Generate()
"""A :class:`Generate` with the default settings."""
