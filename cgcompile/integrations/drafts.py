"""Texts with a draft model: several tokens for one forward of the model.

A step of such a text is a round: the draft model proposes ``count`` tokens, one forward of the
model over the newest token and all proposals gives the logits behind each, and the tokens that the
model itself selects are kept up to the first that differs from its proposal. So a round adds 1 to
``count + 1`` tokens to a row, and the tokens are those of a text without a draft.

Rows advance by different numbers of tokens. So positions, masks, and where keys and values are
written, come from ``counts``, the number of new tokens of each row (``RowLayer``). Keys and
values behind it are overwritten before they are read.

A sampled token is drawn from the distribution of the model: the token with the largest
``probability / noise``, as without a draft. The draft model takes the same noise, so that it mostly
proposes the same token.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cgcompile.errors import ConfigError
from cgcompile.integrations import decode_inputs, next_token
from cgcompile.integrations.decode_inputs import CACHES, NotHeld
from cgcompile.integrations.texts import Call, Forward, Kept, Text

_KINDS = {"full_attention", "sliding_attention"}


def check_draft(model: Any, draft: Any) -> None:
    """Check that a draft model has the tokens of a model.

    Raises:
        ConfigError: it has not.
    """
    own, other = (m.config.get_text_config(decoder=True).vocab_size for m in (model, draft))
    if own != other:
        raise ConfigError.impossible(
            what=f"Generate(draft=...) with a draft model of {other} tokens",
            because=f"the model has {own}",
            instead="Pass a draft model with the same vocabulary.",
        )


class _Side(Text):
    """The model or the draft model of a text, with inputs for rows of different lengths.

    Attributes:
        tokens: how many each forward gets.
        name: of its cache in the state.
    """

    def __init__(self, call: Call, tokens: int, name: str) -> None:
        super().__init__(call)
        self.tokens, self.name = tokens, name
        model = self.model
        config = model.config.get_text_config(decoder=True)
        layers = set(getattr(config, "layer_types", None) or ())
        if model.config.is_encoder_decoder:
            raise NotHeld("a draft with an encoder-decoder model")
        if not layers <= _KINDS:
            raise NotHeld(f"a draft with layers of type {', '.join(sorted(layers - _KINDS))}")
        if not decode_inputs.takes_static_cache(model):
            raise NotHeld("a draft with a model that transformers cannot compile")
        attention = getattr(model.config, "_attn_implementation", "")
        if attention not in ("sdpa", "eager"):
            raise NotHeld(f"a draft with attention of kind {attention}")
        self.adds_mask, self.layers = attention == "eager", layers
        self.is_sliding = any(layer.is_sliding for layer in self.source.layers)
        self.window = getattr(config, "sliding_window", None)
        self.longest = getattr(config, "max_position_embeddings", None)

    def made_caches(self, length: int) -> dict[str, Any]:
        size = (self.rows, self.tokens)
        positions = torch.zeros(size, dtype=torch.long, device=self.device)
        cache = decode_inputs.static_cache(self.model, self.source, length, positions=positions)
        cache.positions, cache.get_seq_length = positions, _no_length
        return {self.name: cache}

    def fill(self, kept: Kept) -> None:
        decode_inputs.fill(kept.caches[self.name], self.source)

    def describe(self, kept: Kept, name: str = "") -> None:
        super().describe(kept, self.name)
        tensors, mask = self.described.tensors, decode_inputs.mask_name(self.model)
        if tensors.keys() != {mask, "position_ids"} or self.described.advance != ("position_ids",):
            raise NotHeld(f"a draft with a model whose steps get {', '.join(tensors)}")
        if tensors["position_ids"].dim() != 2:
            raise NotHeld("a draft with a model of several positions for a token")

    def run(
        self, forward: Forward, state: dict[str, Any], ids: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits behind tokens, ``[rows, tokens, vocabulary]``; of a draft the last.

        Args:
            forward: of the model.
            state: of the text.
            ids: ``[rows, tokens]``.
            counts: ``[rows]``, how many new tokens a row has with the first of them.
        """
        cache, inputs = state[self.name], state[self.name + "_inputs"]
        ahead = counts[:, None] - 1 + torch.arange(self.tokens, device=ids.device)
        cache.positions.copy_(state["past"] + ahead)
        # Those behind the longest text are of tokens that do not count.
        positions = inputs["position_ids"] + torch.minimum(ahead, state["last"])
        if self.name == "draft" and self.longest:  # it may have fewer than the model
            positions = positions.clamp(max=self.longest - 1)
        mask = decode_inputs.mask_name(self.model)
        masks = self._masks(inputs[mask], cache.positions)
        arguments = self.described.build({mask: masks, "position_ids": positions}, ids, cache)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = self.tokens if self.name == "cache" else 1
        return forward(self.model, arguments)

    def _masks(self, mask: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return masks of attention, by the type of layers where a model has several."""
        columns = torch.arange(mask.shape[1], device=mask.device)
        full = (columns <= positions[..., None]) & mask.bool()[:, None]
        masks = {"full_attention": full}
        if self.window:
            masks["sliding_attention"] = full & (columns > positions[..., None] - self.window)
        added = {name: self._added(value[:, None]) for name, value in masks.items()}
        if len(self.layers) > 1:
            return added
        return added["sliding_attention" if self.is_sliding else "full_attention"]

    def _added(self, mask: torch.Tensor) -> torch.Tensor:
        """Return what attention adds to its scores, where it takes no booleans."""
        if not self.adds_mask:
            return mask
        dtype = self.model.dtype
        return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)


class DraftedText(_Side):
    """One call of ``generate`` whose steps are rounds of a draft model and the model.

    Args:
        call: what ``generate`` passes.
        draft: the draft model.
        count: how many tokens it proposes.
    """

    def __init__(self, call: Call, draft: Any, count: int) -> None:
        check_draft(call.model, draft)
        super().__init__(call, 1 + count, "cache")
        devices = {str(device) for device in (getattr(draft, "hf_device_map", None) or {}).values()}
        if draft.device != call.model.device or len(devices) > 1:
            raise NotHeld("a draft model on another device, or on several")
        if self.returns:
            raise NotHeld("return_dict_in_generate with a draft")
        if decode_inputs.follows_length(call.model):
            raise NotHeld("a draft with a rotary embedding that follows the length of the text")
        if not call.ids.shape[1]:
            raise NotHeld("a draft for a prompt of embeddings")
        self.count = count
        # Two: if all proposals are accepted, the keys of the last one are not written yet.
        self.draft = _Side(replace(call, model=draft, kwargs=self._kwargs_of(draft)), 2, "draft")

    def _kwargs_of(self, draft: Any) -> dict[str, Any]:
        """Return the arguments of the draft model for the prompt."""
        ids, mask = self.call.ids, self.call.kwargs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        if mask.shape != ids.shape:
            raise NotHeld(f"a draft with a mask of shape {list(mask.shape)}")
        longest = getattr(draft.config, "max_position_embeddings", None) or ids.shape[1]
        positions = (mask.long().cumsum(-1) - 1).clamp(0, longest - 1)
        name = next(name for name in CACHES if name in self.kwargs)
        kwargs = {"attention_mask": mask, "position_ids": positions, name: True, "use_cache": True}
        if "logits_to_keep" in inspect.signature(type(draft).forward).parameters:
            kwargs["logits_to_keep"] = 1
        return kwargs

    @property
    def sides(self) -> tuple[Text, ...]:
        return self, self.draft

    @property
    def needs_flag(self) -> bool:
        return True

    def steps(self, steps: int) -> int:
        return max(1, steps // (1 + self.count))

    def prefill(self) -> None:
        super().prefill()
        self.draft.run_prompt()
        self.draft.first = self.first
        if self.draft.past != self.past or self.draft.vocabulary != self.vocabulary:
            raise NotHeld("a draft model whose prompt or logits have another size")

    @property
    def needed(self) -> int:
        return self.past + self.limit + self.count + 1

    @property
    def layout(self) -> tuple[Hashable, ...]:
        return *super().layout, self.draft.model, self.draft.model.dtype, self.count

    def made_caches(self, length: int) -> dict[str, Any]:
        return super().made_caches(length) | self.draft.made_caches(length)

    def fill(self, kept: Kept) -> None:
        super().fill(kept)
        self.draft.fill(kept)

    def describe(self, kept: Kept, name: str = "") -> None:
        super().describe(kept)
        self.draft.describe(kept)

    def forget_prefill(self) -> None:
        super().forget_prefill()
        self.draft.forget_prefill()

    def state(self, kept: Kept) -> dict[str, Any]:
        state = super().state(kept)
        state |= {f"{side.name}_inputs": side.inputs(kept, side.name) for side in self._both}
        state["previous"] = kept.buffer("previous", self.call.ids[:, -1].to(self.device))
        numbers = {"past": self.past, "last": max(self.limit - 2, 0), "limit": self.limit}
        for key, number in numbers.items():
            state[key] = kept.buffer(key, torch.tensor(number, device=self.device))
        return state

    @property
    def _both(self) -> tuple[_Side, _Side]:
        return self, self.draft

    def key_of_step(self) -> tuple[Hashable, ...]:
        return *super().key_of_step(), self.draft.described.key

    def step(self, forwards: Sequence[Forward]) -> Callable[[dict[str, Any]], None]:
        rules, samples, count = self.rules, self.call.samples, self.count
        target, draft = (
            partial(side.run, forward) for side, forward in zip(self._both, forwards, strict=True)
        )

        def proposals(state: dict[str, Any], noise: Sequence[Any]) -> torch.Tensor:
            """Return the newest tokens and those of the draft model, ``[rows, 1 + count]``."""
            guess = dict(state)
            for key in ("ids", "invalid"):
                if key in state:
                    guess[key] = state[key].clone()
            tensors = [{k: v.clone() for k, v in one.items()} for one in state["rules"]]
            pairs, tokens = list(zip(rules, tensors, strict=True)), [state["token"]]
            before = state["previous"]
            for number in range(count):
                counts, newest = state["counts"] + number, tokens[-1]
                logits = draft(state, torch.stack((before, newest), dim=1), counts - 1)
                guess["token"], guess["length"] = newest, state["length"] + counts[:, None]
                _shift(guess, newest)
                scores = next_token.processed(_copied(logits[:, -1]), pairs, guess)
                tokens.append(next_token.selected(scores, guess, samples, noise[number]))
                before = newest
            return torch.stack(tokens, dim=1)

        def draft_round(state: dict[str, Any]) -> None:
            rows, vocabulary = len(state["token"]), self.vocabulary
            noise: Any = [None] * (count + 1)
            if samples:
                size = (count + 1, rows, vocabulary)
                noise = torch.empty(size, device=state["token"].device).exponential_(1)
            proposed = proposals(state, noise)
            logits = target(state, proposed, state["counts"])
            active = state["finished"].logical_not()
            pairs = list(zip(rules, state["rules"], strict=True))
            for number in range(count + 1):
                token = proposed[:, number]
                view = {
                    **state,
                    "active": active,
                    "length": state["length"] + state["counts"][:, None],
                    "token": torch.where(active, token, vocabulary),  # no token
                }
                _shift(view, token)
                scores = next_token.processed(_copied(logits[:, number]), pairs, view)
                chosen = next_token.selected(scores, view, samples, noise[number])
                ended = _add(state, active, chosen)
                if number < count:
                    active = active & ~ended & (chosen == proposed[:, number + 1])

        return draft_round


def _no_length(*args: Any) -> int:
    """Refuse a model that reads the length of a cache, which is another one for each row."""
    raise NotHeld("a draft with a model that reads the length of its cache")


def _copied(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(copy=True, dtype=torch.float32)


def _shift(view: dict[str, Any], token: torch.Tensor) -> None:
    """Add a token to the last ids of the rows that are active."""
    if "ids" in view:
        shifted = torch.cat((view["ids"][:, 1:], token[:, None]), dim=-1)
        if "active" in view:
            shifted = torch.where(view["active"][:, None], shifted, view["ids"])
        view["ids"].copy_(shifted)


def _add(state: dict[str, Any], active: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Add a token to the texts of the rows that are active; return whether it ends a row."""
    counts = state["counts"]
    chosen = torch.where(active, chosen, state["pad"])
    state["text"].scatter_(1, counts[:, None], chosen[:, None])  # behind the count is padding
    counts.add_(active)
    state["previous"].copy_(torch.where(active, state["token"], state["previous"]))
    state["token"].copy_(torch.where(active, chosen, state["token"]))
    ends: torch.Tensor = (chosen[:, None] == state["ends"]).any(-1)
    ended: torch.Tensor = ends | (counts >= state["limit"])
    state["finished"].logical_or_(ended & active)
    return ended
