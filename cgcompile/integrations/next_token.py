"""How a captured step selects the next token: logits processors by what each reads.

``generate`` of transformers passes processors that read ``input_ids``, which grow by a column at
each token. In a captured step all shapes are fixed, so a processor is one of:

==================  ================================================================================
reads               in a step
==================  ================================================================================
scores alone        runs as it is
the length of ids   computed here, from a tensor that counts
which tokens occur  computed here, from a table ``[rows, vocabulary]`` that each step marks
the last ids        computed here, from the ids aligned at the right, where -1 stands for no token
anything else       is refused: :func:`refusal` names it
==================  ================================================================================

The rule: a class counts only if it is exactly one of the table, as a subclass may read more; and
what differs between two calls is a tensor of the state, or a part of the key.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile.errors import shown

Tensors = dict[str, torch.Tensor]


class Rule(NamedTuple):
    """One processor of a captured step.

    Attributes:
        key: what is baked into the step: two rules with one key differ in their tensors alone.
        tensors: what one call passes, by name.
        apply: ``(scores, tensors, state) -> scores``.
    """

    key: Any
    tensors: Tensors
    apply: Callable[[torch.Tensor, Tensors, Tensors], torch.Tensor]


class Prompt(NamedTuple):
    """What a rule is made from, beside its processor."""

    ids: torch.Tensor
    vocabulary: int
    device: torch.device


# ---------------------------------------------------------------- rules


def _as_it_is(processor: Any, prompt: Prompt) -> Rule:
    """The processor reads scores and numbers of its own."""

    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        result: torch.Tensor = processor(state["token"][:, None], scores)
        return result

    return Rule((type(processor), _numbers(processor)), {}, apply)


def _before(limit: str, start: str | None = None) -> Callable[[Any, Prompt], Rule]:
    """Return the maker of a rule that excludes end tokens while a text is short."""

    def made(processor: Any, prompt: Prompt) -> Rule:
        shortest = getattr(processor, limit) + (getattr(processor, start) if start else 0)
        tensors = {
            "excluded": _tokens(processor.eos_token_id, prompt),
            "shortest": torch.tensor(shortest, device=prompt.device),
        }
        return Rule(type(processor), tensors, _exclude_before)

    return made


def _exclude_before(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
    excluded = tensors["excluded"] & (state["length"] < tensors["shortest"])
    return torch.where(excluded, -torch.inf, scores)


def _forced_end(processor: Any, prompt: Prompt) -> Rule:
    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        forced = torch.where(tensors["forced"], 0.0, -torch.inf).to(scores.dtype)
        return torch.where(state["length"] == tensors["last"], forced, scores)

    tensors = {
        "forced": _tokens(processor.eos_token_id, prompt),
        "last": torch.tensor(processor.max_length - 1, device=prompt.device),
    }
    return Rule(type(processor), tensors, apply)


def _suppressed(processor: Any, prompt: Prompt) -> Rule:
    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        return torch.where(tensors["excluded"], -torch.inf, scores)

    excluded = _tokens(processor.suppress_tokens, prompt)
    return Rule(type(processor), {"excluded": excluded}, apply)


def _suppressed_at(processor: Any, prompt: Prompt) -> Rule:
    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        excluded = tensors["excluded"] & (state["length"] == tensors["begin"])
        return torch.where(excluded, -torch.inf, scores)

    tensors = {
        "excluded": _tokens(processor.begin_suppress_tokens, prompt),
        "begin": torch.tensor(processor.begin_index, device=prompt.device),
    }
    return Rule(type(processor), tensors, apply)


def _first_token(processor: Any, prompt: Prompt) -> Rule:
    """The processor acts at a length of 1, which is before the first step."""
    return Rule(type(processor), {}, lambda scores, tensors, state: scores)


def _repeated(processor: Any, prompt: Prompt) -> Rule:
    """Scores of tokens that occur are multiplied, or divided where they are positive."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    ids = prompt.ids
    if isinstance(ignored, torch.Tensor):
        columns = torch.arange(ids.shape[1], device=ids.device)
        ids = ids.masked_fill(columns < ignored.to(ids.device)[:, None], prompt.vocabulary)
    elif ignored:
        ids = ids[:, ignored:]
    penalty = processor.penalty

    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        seen = tensors["seen"]
        seen.scatter_(1, state["token"][:, None].clamp(max=scores.shape[-1]), True)
        return _penalised(scores, seen, penalty)

    return Rule((type(processor), penalty), {"seen": _occurring(ids, prompt)}, apply)


def _repeated_of_encoder(processor: Any, prompt: Prompt) -> Rule:
    penalty, ids = processor.penalty, processor.encoder_input_ids
    rows = prompt.ids.shape[0] // ids.shape[0]
    ids = ids.repeat_interleave(rows, dim=0) if rows > 1 else ids

    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        return _penalised(scores, tensors["seen"], penalty)

    return Rule((type(processor), penalty), {"seen": _occurring(ids, prompt)}, apply)


def _penalised(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen[:, : scores.shape[-1]], penalised, scores)


def _no_repeated_ngram(processor: Any, prompt: Prompt) -> Rule:
    size = processor.ngram_size

    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        ids, vocabulary = state["ids"], scores.shape[-1]
        prefix = ids[:, ids.shape[1] + 1 - size :]
        windows = ids.unfold(1, size, 1)
        matches = (windows[..., :-1] == prefix[:, None]).all(-1) & (windows[..., -1] >= 0)
        matches &= (prefix >= 0).all(-1, keepdim=True)
        # What does not match marks a column behind the vocabulary.
        banned = scores.new_zeros((scores.shape[0], vocabulary + 1), dtype=torch.bool)
        last = windows[..., -1].clamp(max=vocabulary)
        banned.scatter_(1, torch.where(matches, last, vocabulary), True)
        return scores.masked_fill(banned[:, :vocabulary], -torch.inf)

    return Rule((type(processor), size), {}, apply)


def _biased_sequences(processor: Any, prompt: Prompt) -> Rule:
    """A bias is added to the last token of a sequence whose other tokens were the last ones."""
    biases: dict[tuple[int, ...], float] = {
        tuple(int(token) for token in tokens): float(bias)
        for tokens, bias in processor.sequence_bias.items()
    }
    single = torch.zeros(prompt.vocabulary, device=prompt.device)
    for (token, *more), bias in biases.items():
        if not more:
            single[token] = bias
    tensors, sizes = {"single": single}, []
    for number, (tokens, bias) in enumerate(biases.items()):
        if len(tokens) > 1:
            sizes.append(number)
            tensors[f"prefix{number}"] = torch.tensor(tokens[:-1], device=prompt.device)
            tensors[f"last{number}"] = torch.tensor(tokens[-1:], device=prompt.device)
            tensors[f"bias{number}"] = torch.tensor(bias, device=prompt.device)

    def apply(scores: torch.Tensor, tensors: Tensors, state: Tensors) -> torch.Tensor:
        total = tensors["single"].expand_as(scores).clone()
        for number in sizes:
            prefix = tensors[f"prefix{number}"]
            ends = (state["ids"][:, -prefix.shape[0] :] == prefix).all(-1, keepdim=True)
            added = torch.where(ends, tensors[f"bias{number}"], 0.0)
            total.index_add_(1, tensors[f"last{number}"], added)
        return scores + total

    return Rule((type(processor), tuple(map(len, biases))), tensors, apply)


# ---------------------------------------------------------------- the table

_RULES: dict[str, Callable[[Any, Prompt], Rule]] = {
    "TemperatureLogitsWarper": _as_it_is,
    "TopKLogitsWarper": _as_it_is,
    "TopPLogitsWarper": _as_it_is,
    "MinPLogitsWarper": _as_it_is,
    "TypicalLogitsWarper": _as_it_is,
    "EpsilonLogitsWarper": _as_it_is,
    "InfNanRemoveLogitsProcessor": _as_it_is,
    "LogitNormalization": _as_it_is,
    "SuppressTokensLogitsProcessor": _suppressed,
    "SuppressTokensAtBeginLogitsProcessor": _suppressed_at,
    "MinLengthLogitsProcessor": _before("min_length"),
    "MinNewTokensLengthLogitsProcessor": _before("min_new_tokens", "prompt_length_to_skip"),
    "ForcedBOSTokenLogitsProcessor": _first_token,
    "ForcedEOSTokenLogitsProcessor": _forced_end,
    "RepetitionPenaltyLogitsProcessor": _repeated,
    "EncoderRepetitionPenaltyLogitsProcessor": _repeated_of_encoder,
    "NoRepeatNGramLogitsProcessor": _no_repeated_ngram,
    "SequenceBiasLogitsProcessor": _biased_sequences,
    "NoBadWordsLogitsProcessor": _biased_sequences,
}
READ_IDS = (_no_repeated_ngram, _biased_sequences)


def _maker(processor: Any) -> Callable[[Any, Prompt], Rule] | None:
    """Return what makes the rule of a processor; None if the table does not have its class."""
    kind = type(processor)
    library = kind.__module__ == "transformers.generation.logits_process"
    return _RULES.get(kind.__name__) if library else None


def refusal(processors: Iterable[Any]) -> str:
    """Return why processors cannot run in a captured step; empty if they can."""
    for processor in processors:
        maker = _maker(processor)
        if maker is None:
            return (
                f"the logits processor {type(processor).__name__} is not one that a graph can hold"
            )
        if maker is _as_it_is:
            try:
                _numbers(processor)
            except TypeError as error:
                return f"the logits processor {type(processor).__name__} has {error}"
    return ""


def reads_ids(processors: Iterable[Any]) -> bool:
    """Return whether a processor reads the last ids."""
    return any(_maker(processor) in READ_IDS for processor in processors)


def rules_of(processors: Sequence[Any], prompt: Prompt) -> list[Rule]:
    """Return the rules of processors that are not refused; ``prompt`` is before the first token."""
    makers = [(_maker(processor), processor) for processor in processors]
    return [maker(processor, prompt) for maker, processor in makers if maker is not None]


def _numbers(processor: Any) -> tuple[tuple[str, Any], ...]:
    """Return the attributes of a processor that reads numbers alone."""
    for name, value in vars(processor).items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise TypeError(f"{name}={shown(value)}")
    return tuple(sorted(vars(processor).items()))


def _tokens(tokens: Any, prompt: Prompt) -> torch.Tensor:
    """Return a mask of the vocabulary, ``[vocabulary]``; ids outside of it do not count."""
    listed = torch.as_tensor(tokens).to(prompt.device).reshape(-1)
    return (torch.arange(prompt.vocabulary, device=prompt.device)[:, None] == listed).any(-1)


def _occurring(ids: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Return which tokens occur, ``[rows, vocabulary + 1]``; the last column is of all others."""
    rows = prompt.ids.shape[0]
    seen = torch.zeros((rows, prompt.vocabulary + 1), dtype=torch.bool, device=prompt.device)
    return seen.scatter_(1, ids.to(prompt.device).clamp(max=prompt.vocabulary), True)


def processed(
    logits: torch.Tensor, rules: Sequence[tuple[Rule, Tensors]], state: Tensors
) -> torch.Tensor:
    """Return the scores of the next tokens, ``[rows, vocabulary]``.

    Args:
        logits: ``[rows, vocabulary]`` in float32, of the last position.
        rules: each with its tensors.
        state: has ``length``, ``token``, and ``ids`` where a rule reads them.
    """
    scores = logits
    for rule, tensors in rules:
        scores = rule.apply(scores, tensors, state)
    return scores


def selected(
    scores: torch.Tensor, state: Tensors, samples: bool, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the next tokens, ``[rows]``.

    Args:
        scores: ``[rows, vocabulary]``.
        state: has ``invalid``, which is set where no distribution can be drawn from, of the rows in
            ``active`` if it is there.
        samples: draws from the default generator, else the largest score.
        noise: ``[rows, vocabulary]``, exponentially distributed, in place of numbers that are drawn
            here.
    """
    if not samples:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    # A NaN or an infinity makes the whole row NaN.
    invalid = probabilities[:, 0].isnan()
    state["invalid"].logical_or_((invalid & state.get("active", invalid)).any())
    # As `torch.multinomial` draws one sample, without its check on the host.
    if noise is None:
        noise = torch.empty_like(probabilities).exponential_(1)
    return (probabilities / noise).argmax(-1)
