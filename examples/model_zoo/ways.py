"""How the zoo compiles a model, and the calls that it makes of it."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import cgcompile
from model_zoo.entries import VOCABULARY, Entry, nothing

Call = Callable[..., Any]
PROMPT, NEW_TOKENS = 5, 3


@dataclass(frozen=True)
class Step:
    """One call of the model.

    Attributes:
        key: calls of one key have the same shapes.
        round: which one it is in.
        counts: it is behind the warm rounds.
        eager: what is expected.
        compiled: what is found.
        inputs: those of eager and of the compiled model, if the call may be repeated; equal
            before, and equal after.
        exact: the same in float64, if that is compared.
    """

    key: tuple[int, ...]
    round: int
    counts: bool
    eager: Callable[[], Any]
    compiled: Callable[[], Any]
    inputs: tuple[Any, ...] = ()
    exact: Callable[[], Any] | None = None

    def __str__(self) -> str:
        size = f"batch {self.key[0]}" + "".join(f", token {token}" for token in self.key[1:])
        return f"{size}, round {self.round}"


# ---------------------------------------------------------------- compiled


def through_torch(model: torch.nn.Module, entry: Entry, backend: cgcompile.Backend) -> Call:
    """``torch.compile``, as everybody calls it."""
    return torch.compile(model, backend=backend)


def traced_once(
    model: torch.nn.Module, entry: Entry, settings: Any, splitting: str
) -> tuple[cgcompile.Backend, Call, Call]:
    """``cgcompile.compile``, or, not traced, as ``breakable`` or ``full`` graphs.

    There are no guards, unless something beside the inputs changes from call to call.

    Returns:
        The backend, what an engine calls, and what runs plain where that is not traced.
    """
    if splitting == "fx":
        drawn = entry.inputs(2).items()
        dims = {name: 0 for name, value in drawn if isinstance(value, torch.Tensor) and value.ndim}
        backend = settings.backend()
        guards = "none" if entry.around is nothing else "keep"
        compiled = cgcompile.compile(model, backend, dynamic_dims=dims, guards=guards)
        return backend, compiled, compiled
    full = {"mode": "NONE", "cudagraph_mode": "FULL"}
    backend = settings.backend(**(full if splitting == "full" else {"splitting": "breakable"}))
    compiled = cgcompile.compile(model, backend)
    mode = cgcompile.CUDAGraphMode["FULL" if splitting == "full" else "PIECEWISE"]
    static: dict[Any, dict[str, torch.Tensor]] = {}

    def call(**inputs: Any) -> Any:
        """What an engine does: inputs are copied to where the graphs of this size read."""
        batch = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        size = len(next(iter(batch.values())))
        buffers = static.setdefault(size, batch)
        for name, value in batch.items():
            buffers[name].copy_(value)
        descriptor = cgcompile.BatchDescriptor(size)
        with cgcompile.set_forward_context(
            None, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        ):
            return compiled(**inputs | buffers)

    return backend, call, compiled


# ---------------------------------------------------------------- called


def forward_steps(
    model: torch.nn.Module, entry: Entry, compiled: Call, settings: Any, exact: Any = None
) -> Iterator[Step]:
    """Whole batches, all sizes once in each round; ``exact`` is the model in float64, if any."""
    around = functools.partial(_around, entry, model)
    for number, (turn, size) in enumerate(_sizes(settings)):
        batch = _on(settings.device, entry.inputs(size), settings.dtype)
        doubled = _on(settings.device, batch, "float64")
        inputs, copy = (pytree.tree_map_only(torch.Tensor, torch.clone, batch) for _ in range(2))
        yield Step(
            (size,),
            turn,
            turn >= settings.warm,
            functools.partial(around, number, model, inputs),
            functools.partial(around, number, compiled, copy),
            (inputs, copy),
            exact and functools.partial(_around, entry, exact, number, exact, doubled),
        )


def _around(
    entry: Entry, model: torch.nn.Module, number: int, call: Call, inputs: dict[str, Any]
) -> Any:
    with entry.around(model, number):
        return call(**inputs, **entry.settings)


def decode_steps(
    model: torch.nn.Module, entry: Entry, compiled: Call, settings: Any, exact: Any = None
) -> Iterator[Step]:
    """A plain prefill of a static cache, then tokens one by one; each size has its own caches."""
    from transformers import StaticCache

    config: Any = model.config
    caches: dict[int, tuple[Any, ...]] = {}
    models = [model, model, *([] if exact is None else [exact])]
    for turn, size in _sizes(settings):
        if size not in caches:
            caches[size] = tuple(
                StaticCache(config=config, max_cache_len=PROMPT + NEW_TOKENS) for _ in models
            )
        tokens = torch.randint(4, VOCABULARY, (size, PROMPT + NEW_TOKENS)).to(settings.device)
        for filler, cache in zip(models, caches[size], strict=True):
            cache.reset()
            _decode(filler, tokens[:, :PROMPT], cache)
        for position in range(PROMPT, PROMPT + NEW_TOKENS):
            eager, replayed, *double = caches[size]
            token = tokens[:, position : position + 1].clone()
            yield Step(
                (size, position),
                turn,
                turn >= settings.warm,
                lambda t=token, c=eager: _decode(model, t, c),  # type: ignore[misc]
                lambda t=token, c=replayed: _decode(compiled, t, c),  # type: ignore[misc]
                exact=exact and functools.partial(_decode, exact, token, *double),
            )


def _decode(call: Callable[..., Any], tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = call(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return logits


def _sizes(settings: Any) -> Iterator[tuple[int, int]]:
    order = random.Random(settings.seed)
    torch.manual_seed(settings.seed + 1)
    for turn in range(settings.rounds):
        for size in order.sample(settings.sizes, len(settings.sizes)):
            yield turn, size


def _on(device: str, batch: dict[str, Any], dtype: str) -> dict[str, Any]:
    def placed(tensor: torch.Tensor) -> torch.Tensor:
        kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, kind)

    moved: dict[str, Any] = pytree.tree_map_only(torch.Tensor, placed, batch)
    return moved
