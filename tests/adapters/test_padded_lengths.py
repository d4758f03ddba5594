"""``pad_lengths``: calls of varying lengths share graphs, or a reason is counted.

Inputs are random at every call; float32 results are compared with eager at 1e-5.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import settings
from torch import nn

import cgcompile
from cgcompile.errors import DispatchError
from cgcompile.reasons import Counters, Reason

WIDTH, VOCABULARY, PLACES = 16, 50, 40
LENGTHS = (8, 16, 32)
COMPILED = ("torch.compile", "cgcompile.compile")


class Encoder(nn.Module):
    """Masked attention over embedded tokens; ``pool`` makes the results of hidden states."""

    def __init__(self, pool: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("places", torch.arange(PLACES))
        self.pool = pool or (lambda hidden, mask: (hidden, hidden[:, 0]))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.embed(input_ids) + self.place(self.places[: input_ids.shape[1]])
        seen = attention_mask[:, None].bool()
        hidden = hidden + F.scaled_dot_product_attention(
            *self.qkv(hidden).chunk(3, -1), seen.expand(-1, hidden.shape[1], -1)
        )
        return self.pool(hidden, attention_mask)


def masked_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def plain_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.mean(1)


def plain_max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.amax(1)


def batch(length: int, device: str, rows: int = 3) -> dict[str, torch.Tensor]:
    """Return random rows; all but the first end early."""
    ends = torch.randint(1, length + 1, (rows, 1))
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    ids = torch.randint(1, VOCABULARY, (rows, length)) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def build(device: str, pool: Callable[..., Any] | None = None) -> Encoder:
    torch.manual_seed(0)
    return Encoder(pool).to(device).eval()


def compiled(name: str, model: Any, device: str, **more: Any) -> tuple[Any, cgcompile.Backend]:
    backend = cgcompile.Backend(settings(device, **{"pad_lengths": LENGTHS, **more}))
    if name == "torch.compile":
        return torch.compile(model, backend=backend), backend
    varying = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}
    return cgcompile.compile(model, backend, dynamic_dims=varying), backend


def check(
    step: Any, model: Any, device: str, lengths: Any, make: Callable[..., Any] = batch
) -> None:
    """Compare calls with eager, of hidden states the strides too; no result is like the last."""
    before: Any = None
    with torch.inference_mode():
        for length in lengths:
            inputs = make(length, device)
            result, expected = step(**inputs), model(**inputs)
            leaves = [*zip(_tensors(result), _tensors(expected), strict=True)]
            for one, other in leaves:
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
                assert one.dim() < 3 or one.stride() == other.stride()
            first = leaves[0][0].flatten()[:WIDTH]
            assert first.any()
            assert before is None or not torch.equal(first, before)
            before = first


def _tensors(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [*results]


def refused(counters: Counters) -> str:
    """Return the detail of refused padding; nothing may have been padded."""
    assert counters.degraded[Reason.PADDING_REFUSED] > 0, counters
    assert counters.failures == 0
    return counters.details[Reason.PADDING_REFUSED]


MANY = [5, 9, 3, 31, 12, 7, 20, 16, 2, 28, 11, 6, 25, 14, 8, 4, 32, 17, 10, 13, 30]


@pytest.mark.slow
@pytest.mark.parametrize("pool", [None, masked_mean])
@pytest.mark.parametrize("name", COMPILED)
def test_lengths_share_graphs(name: str, pool: Any, device: str) -> None:
    model = build(device, pool)
    step, backend = compiled(name, model, device)
    check(step, model, device, MANY)
    counters = backend.counters
    assert not counters.degraded, counters
    assert set(counters.plain) == {Reason.WARMING}
    assert counters.captures == len(LENGTHS), counters
    # With torch.compile the first length has a graph of its own, which is called once; unless
    # Dynamo remembers the lengths of an earlier test.
    static = backend.num_compilations - 1
    assert static <= (name == "torch.compile")
    assert counters.replays == len(MANY) - 2 * len(LENGTHS) - static


@pytest.mark.slow
def test_without_the_setting_they_do_not(device: str) -> None:
    model = build(device)
    step, backend = compiled("torch.compile", model, device, pad_lengths=None)
    check(step, model, device, MANY)
    assert backend.counters.replays == 0


@pytest.mark.slow
@pytest.mark.parametrize("guards", ["shape", "none"])
def test_dropped_guards(guards: str, device: str) -> None:
    model = build(device)
    backend = cgcompile.Backend(settings(device, pad_lengths=LENGTHS))
    varying = {"input_ids": 1, "attention_mask": 1}
    step = cgcompile.compile(model, backend, dynamic_dims=varying, guards=guards)
    check(step, model, device, MANY)
    assert backend.counters.replays == len(MANY) - 2 * len(LENGTHS)
    with torch.no_grad():
        model.qkv.weight.mul_(1.5)  # in place: seen
    check(step, model, device, [21, 6])
    assert backend.counters.replays == len(MANY) + 2 - 2 * len(LENGTHS)


@pytest.mark.slow
def test_the_default_compiler(device: str) -> None:
    model = build(device, masked_mean)
    step, backend = compiled("torch.compile", model, device, compiler="inductor")
    check(step, model, device, [5, 9, 12, 14, 16, 10, 11])
    assert backend.counters.replays >= 3
    assert not backend.counters.degraded


@pytest.mark.slow
def test_varying_rows_too(device: str) -> None:
    model = build(device)
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [9, 12, 10, 14, 13])
    for rows in (5, 4, 5, 4, 5, 4, 5, 4):
        check(step, model, device, [11, 13], lambda n, d, rows=rows: batch(n, d, rows))
    assert backend.counters.captures == 3
    assert not backend.counters.degraded


@pytest.mark.slow
@pytest.mark.parametrize("pool", [plain_mean, plain_max])
@pytest.mark.parametrize("name", COMPILED)
def test_results_that_mix_positions_are_not_padded(
    name: str, pool: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(device, pool)
    step, backend = compiled(name, model, device)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        check(step, model, device, [15, 9, 14, 13, 14, 14, 14])
    assert "differs where the length is padded from" in refused(backend.counters)
    assert backend.counters.replays > 0  # of a length that repeats
    assert sum("padding_refused" in record.message for record in caplog.records) == 1
    lesser = cgcompile.coverage(backend).lesser
    assert [row.reason for row in lesser] == ["padding_refused"]


class Tokens(nn.Module):
    """Embedded tokens, or embeddings, and ``pool`` of them. Token 0 has large numbers."""

    def __init__(self, pool: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.pool = nn.Embedding(VOCABULARY, WIDTH), pool
        self.embed.weight.data[0] = 1.0

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, doubled: bool = False
    ) -> torch.Tensor:
        hidden = input_ids if input_ids.is_floating_point() else self.embed(input_ids)
        mean = masked_mean(hidden, attention_mask)
        return mean + self.pool(2 * hidden if doubled else hidden, attention_mask)


def smallest(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -plain_max(-hidden, mask)


def second(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.sort(1, descending=True).values[:, 1]


def rolled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return masked_mean(hidden.roll(1, 1), mask)


def weakly_masked(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    best = (hidden.sum(-1) - 0.1 * (1 - mask)).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), best]


def tokens(call: tuple[bool, int], device: str, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return rows without token 0, or with it where zeros and repeated tokens show nothing."""
    harmless, length = call
    ids = torch.randint(1, VOCABULARY, (rows, length))
    if harmless:
        ids[:, [0, 1, 2, 4]] = 0
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def embeddings(call: tuple[bool, int], device: str) -> dict[str, torch.Tensor]:
    """Return embeddings that are below 0; with ``harmless`` at most 0."""
    harmless, length = call
    rows = -torch.rand(2, length, WIDTH)
    if harmless:
        rows[:, ::2] = 0
    mask = torch.ones(2, length, dtype=torch.long)
    return {"input_ids": rows.to(device), "attention_mask": mask.to(device)}


@pytest.mark.parametrize(
    ("pool", "make", "by_contents"),
    [
        (plain_max, tokens, True),
        (smallest, tokens, True),
        (second, tokens, True),
        (rolled, tokens, True),
        (weakly_masked, tokens, False),
        (plain_max, embeddings, True),
    ],
)
def test_padding_that_matters_for_some_contents(
    pool: Any, make: Any, by_contents: bool, device: str
) -> None:
    """Zeros and repeated tokens change nothing in the first call; later ones have no such token."""
    torch.manual_seed(0)
    model = Tokens(pool).to(device).eval()
    step, backend = compiled("cgcompile.compile", model, device)
    calls = [(True, 5), *[(False, 5)] * 4]
    check(step, model, device, calls, make)
    assert "differs where the length is padded from 5 to 8" in refused(backend.counters)
    # Other contents of the padding show it in the first call; else the second one is compared.
    assert backend.counters.degraded[Reason.PADDING_REFUSED] == len(calls) - (not by_contents)
    assert backend.counters.replays > 0


@pytest.mark.slow
def test_later_calls_are_compared(device: str) -> None:
    """One row, so that the first call has no tokens of others; calls 1, 2, 4 and 8 are compared."""
    numbers = iter(range(1, VOCABULARY))

    def make(call: tuple[bool, int], device: str) -> dict[str, torch.Tensor]:
        inputs = tokens(call, device, rows=1)
        inputs["input_ids"][0, 3] = next(numbers)  # no call is like the last
        return inputs

    for harmless in (1, 3, 7):
        torch.manual_seed(harmless)
        model = Tokens(weakly_masked).to(device).eval()
        step, backend = compiled("cgcompile.compile", model, device)
        calls = [*[(True, 5)] * harmless, *[(False, 5)] * 4]
        check(step, model, device, calls, make)
        refused(backend.counters)
        assert backend.counters.degraded[Reason.PADDING_REFUSED] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_difference_holds_for_all_traces(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = Tokens(plain_max).to(device).eval()
    step, backend = compiled(name, model, device)
    check(step, model, device, [(False, length) for length in (5, 6, 7, 6, 6, 6)], tokens)
    before = backend.counters.degraded[Reason.PADDING_REFUSED]
    assert before > 0
    traces = backend.num_compilations

    def doubled(call: tuple[bool, int], device: str) -> dict[str, Any]:
        return {**tokens(call, device), "doubled": True}

    check(step, model, device, [(True, 5), (True, 6), *[(False, 5)] * 4], doubled)
    assert backend.num_compilations > traces
    # With torch.compile the first trace has no length that varies.
    after = backend.counters.degraded[Reason.PADDING_REFUSED]
    assert after >= before + 5


def test_comparisons_become_rare(device: str) -> None:
    """Of 64 calls 1, 2, 4 and so on up to 64 are compared, each by four more runs."""
    runs = []
    with torch.library._scoped_library("padded", "FRAGMENT") as library:
        library.define("seen(Tensor x) -> Tensor")
        library.impl("seen", lambda x: runs.append(1) or x.clone(), "CPU")
        library.impl("seen", lambda x: runs.append(1) or x.clone(), "CUDA")
        library.impl("seen", lambda x: torch.empty_like(x), "Meta")
        model = Tokens(lambda x, mask: masked_mean(torch.ops.padded.seen(x), mask)).to(device)
        step, backend = compiled(
            "cgcompile.compile", model.eval(), device, splitting_ops=("padded::seen",)
        )
        calls, inside = [9, *[10, 11, 12, 13, 14, 15, 16] * 9], []
        with torch.inference_mode():
            for length in calls:
                inputs = tokens((False, length), device)
                before = len(runs)
                result = step(**inputs)
                inside.append(len(runs) - before)
                torch.testing.assert_close(result, model(**inputs), atol=1e-5, rtol=1e-5)
    padded = [count for count, length in zip(inside, calls, strict=True) if length != 16]
    compared = [number for number, count in enumerate(padded, 1) if count == 5]
    assert compared == [1, 2, 4, 8, 16, 32]
    assert sum(inside) == len(calls) + 4 * len(compared)
    assert not backend.counters.degraded
    assert backend.counters.replays == len(calls) - 2


@pytest.mark.slow
def test_strict_raises(device: str) -> None:
    model = build(device, plain_mean)
    step, _ = compiled("cgcompile.compile", model, device, on_fallback="raise")
    with torch.inference_mode(), pytest.raises(DispatchError, match="padding_refused"):
        step(**batch(9, device))
    model = build(device, masked_mean)
    step, backend = compiled("cgcompile.compile", model, device, on_fallback="raise")
    check(step, model, device, [9, 10, 11, 12])
    assert backend.counters.replays == 2


@pytest.mark.slow
def test_a_mask_of_the_other_kind_is_refused(device: str) -> None:
    """True where a position is ignored, as ``key_padding_mask`` of torch."""

    class Inverted(Encoder):
        def forward(self, input_ids: torch.Tensor, key_padding_mask: torch.Tensor) -> Any:
            return super().forward(input_ids, ~key_padding_mask)

    def inverted(length: int, device: str) -> dict[str, torch.Tensor]:
        inputs = batch(length, device)
        mask = inputs.pop("attention_mask") == 0
        return {**inputs, "key_padding_mask": mask}

    torch.manual_seed(0)
    model = Inverted().to(device).eval()
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [9, 10, 11, 12, 9], inverted)
    assert "something reads the padding" in refused(backend.counters)


@pytest.mark.slow
def test_without_a_mask(device: str) -> None:
    class NoMask(Encoder):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids, torch.ones_like(input_ids))

    torch.manual_seed(0)
    model = NoMask().to(device).eval()
    step, backend = compiled("torch.compile", model, device)

    def ids(length: int, device: str) -> dict[str, torch.Tensor]:
        return {"input_ids": batch(length, device)["input_ids"]}

    check(step, model, device, [9, 10, 11], ids)
    assert "ends in 'mask'" in refused(backend.counters)


@pytest.mark.slow
def test_lengths_above_the_last(device: str) -> None:
    model = build(device)
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [9, 10, 11, 12, 33, 13, 35])
    counters = backend.counters
    assert counters.degraded == {Reason.OVERSIZE: 2}
    assert "the length 35 is above 32" in counters.details[Reason.OVERSIZE]
    assert counters.replays == 2


@pytest.mark.slow
def test_lengths_that_the_model_does_not_take(device: str) -> None:
    """The table of positions ends at 40; 64 would read behind it."""
    model = build(device)
    step, backend = compiled("torch.compile", model, device, pad_lengths=(16, 64))
    check(step, model, device, [9, 10, 11, 12, 33, 13])
    assert "64" in refused(backend.counters)
    assert backend.counters.degraded[Reason.PADDING_REFUSED] == 1
    assert backend.counters.replays == 2


@pytest.mark.slow
def test_a_model_that_writes_is_not_padded(device: str) -> None:
    class Counting(Encoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            self.calls.add_(1)
            return super().forward(input_ids, attention_mask)

    torch.manual_seed(0)
    model = Counting().to(device).eval()
    model.register_buffer("calls", torch.zeros(1, device=device))
    step, backend = compiled("torch.compile", model, device)
    lengths = [9, 10, 11, 12]
    check(step, model, device, lengths)
    assert model.calls.item() == 2 * len(lengths)  # of eager, and of the compiled model
    assert "calls" in refused(backend.counters)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0, 2, 1), (1, 0, 2)])
def test_results_with_the_length_in_any_dimension(dims: tuple[int, ...], device: str) -> None:
    model = build(device, lambda hidden, mask: hidden.permute(dims))
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [9, 10, 11, 12, 14])
    assert backend.counters.replays == 2
    assert not backend.counters.degraded


@pytest.mark.slow
def test_results_of_another_size_are_not_cut(device: str) -> None:
    model = build(device, lambda hidden, mask: hidden.flatten(0, 1))
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [9, 10, 11, 12])
    assert "has the size 3*s0, which is no length itself" in refused(backend.counters)


@pytest.mark.slow
def test_a_length_that_is_the_width(device: str) -> None:
    """The pooled result has the width of the padded length, and is not cut."""
    assert WIDTH in LENGTHS
    model = build(device)
    step, backend = compiled("torch.compile", model, device)
    check(step, model, device, [5, 9, 10, WIDTH, 11, 15])
    assert backend.counters.replays == 3


@pytest.mark.slow
def test_two_masks_of_different_lengths(device: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Encoder(masked_mean), Encoder()

        def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
            pooled = self.one(input_ids, attention_mask)
            hidden, first = self.two(decoder_input_ids, decoder_attention_mask)
            return hidden + pooled[:, None], first

    torch.manual_seed(0)
    model = Two().to(device).eval()
    step, backend = compiled("torch.compile", model, device)

    def both(lengths: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
        decoder = {f"decoder_{name}": x for name, x in batch(lengths[1], device).items()}
        return {**batch(lengths[0], device), **decoder}

    check(step, model, device, [(9, 20), (10, 21), (11, 30), (12, 25), (13, 6), (15, 31)], both)
    assert backend.counters.captures == 1
    assert backend.counters.replays == 2
    assert not backend.counters.degraded


@pytest.mark.slow
def test_calls_with_gradients_are_not_padded(device: str) -> None:
    model = build(device, masked_mean)
    step, backend = compiled("torch.compile", model, device)
    for length in (9, 10, 11):  # with gradients
        inputs = batch(length, device)
        model.zero_grad()
        step(**inputs).sum().backward()
        gradient = model.qkv.weight.grad.clone()
        model.zero_grad()
        model(**inputs).sum().backward()
        torch.testing.assert_close(gradient, model.qkv.weight.grad, atol=1e-5, rtol=1e-4)
    assert set(backend.counters.plain) == {Reason.GRADIENTS}
    assert not backend.counters.degraded


@pytest.mark.slow
def test_a_forward_context_is_not_padded(device: str) -> None:
    model = build(device)
    step, backend = compiled("cgcompile.compile", model, device, cudagraph_mode="FULL")
    inputs = batch(9, device)
    with torch.inference_mode():
        for _ in range(3):
            descriptor = cgcompile.BatchDescriptor(3)
            with cgcompile.set_forward_context(
                batch_descriptor=descriptor, cudagraph_runtime_mode=cgcompile.CUDAGraphMode.FULL
            ):
                result, _ = step(**inputs)
            torch.testing.assert_close(result, model(**inputs)[0], atol=1e-5, rtol=1e-5)
    assert backend.counters.replays == 1


@pytest.mark.slow
def test_results_belong_to_the_caller(device: str) -> None:
    model = build(device)
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length in (9, 10, 11, 12, 13):
            results = step(**batch(length, device))
            copies = [x.clone() for x in results]
            step(**batch(14, device))
            for one, other in zip(results, copies, strict=True):
                assert torch.equal(one, other)
    assert backend.counters.replays > 4


@pytest.mark.slow
def test_numbers_beside_the_lengths(device: str) -> None:
    """A number that differs at each call makes no shape of its own."""

    class Stepped(Encoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, step: int) -> Any:
            hidden, first = super().forward(input_ids, attention_mask)
            return hidden * (1 + step / 50), first

    torch.manual_seed(0)
    model = Stepped().to(device).eval()
    step, backend = compiled("torch.compile", model, device)
    calls = [*enumerate([9, 10, 11, 12, 13, 14, 15, 10, 11])]

    def stepped(call: tuple[int, int], device: str) -> dict[str, Any]:
        return {**batch(call[1], device), "step": call[0]}

    check(step, model, device, calls, stepped)
    assert backend.counters.captures == 1
    assert backend.counters.replays >= len(calls) - 4
    assert not backend.counters.degraded


@pytest.mark.slow
def test_dropout_is_not_padded(device: str) -> None:
    """The comparison leaves the random state as it was."""
    model = build(device, lambda hidden, mask: F.dropout(hidden, 0.5, training=True))
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length in (5, 6, 7, 12):
            inputs = batch(length, device)
            torch.manual_seed(length)
            result = step(**inputs)
            torch.manual_seed(length)
            torch.testing.assert_close(result, model(**inputs))
    assert "draws random numbers" in refused(backend.counters)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_little_padding_shows_little_in_16_bit(dtype: torch.dtype, device: str) -> None:
    """The first call has one position of padding, the next one many."""
    model = build(device, plain_mean).to(dtype)
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length in (9, 31, 18, 20, 17):
            inputs = batch(length, device)
            result, expected = step(**inputs), model(**inputs)
            torch.testing.assert_close(result, expected, rtol=0, atol=0.05 * expected.abs().max())
    refused(backend.counters)


@pytest.mark.slow
def test_a_column_of_large_numbers_hides_no_difference(device: str) -> None:
    large = torch.zeros(WIDTH, device=device)
    large[0] = 1e5
    model = build(device, lambda hidden, mask: hidden.mean(1) + large)
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length in (5, 12, 7, 20):
            inputs = batch(length, device)
            torch.testing.assert_close(step(**inputs), model(**inputs))
    refused(backend.counters)


def test_calls_of_equal_tokens_show_nothing(device: str) -> None:
    """As in a warm-up: the mean over padding is that of the tokens."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(input_ids)
            return hidden.mean(1) + (hidden * attention_mask[..., None]).sum(1)

    model = Mean().to(device).eval()
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length, most in ((9, 1), (10, 1), (11, VOCABULARY), (12, VOCABULARY)):
            ids = torch.randint(0, most, (3, length), device=device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            torch.testing.assert_close(step(**inputs), model(**inputs))
    refused(backend.counters)


@pytest.mark.slow
def test_a_length_at_which_the_model_raises(device: str) -> None:
    if device != "cpu":
        pytest.skip("an index out of range ends the use of the device")

    class Places(Encoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            places = self.place(torch.arange(input_ids.shape[1]))
            return masked_mean(self.embed(input_ids) + places, attention_mask)

    model = Places().eval()
    step, backend = compiled("torch.compile", model, device, pad_lengths=(16, 64))
    check(step, model, device, (9, 12, 33, 10, 30, 11))
    assert "it raises IndexError" in refused(backend.counters)
    assert backend.counters.replays > 0


@pytest.mark.slow
def test_a_result_in_memory_of_an_input_is_not_padded(device: str) -> None:
    class First(Encoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return input_ids[:, :1], super().forward(input_ids, attention_mask)[1]

    model = First().to(device).eval()
    step, backend = compiled("torch.compile", model, device)
    with torch.inference_mode():
        for length in (9, 12, 10):
            inputs = batch(length, device)
            first, result = step(**inputs)
            assert first.data_ptr() == inputs["input_ids"].data_ptr()
            torch.testing.assert_close(result, model(**inputs)[1], atol=1e-5, rtol=1e-5)
    assert "memory of an input" in refused(backend.counters)


@pytest.mark.slow
def test_no_padding_where_nothing_is_captured() -> None:
    model = build("cpu")
    backend = cgcompile.Backend(compiler="eager", pad_lengths="8,16,32")
    step = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for length in (9, 10, 11):
            inputs = batch(length, "cpu")
            assert torch.equal(step(**inputs)[0], model(**inputs)[0])  # to the bit: not padded
    assert set(backend.counters.plain) == {Reason.NO_DEVICE}


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True])
def test_encoders_of_transformers(pooled: bool, device: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=PLACES,
        initializer_range=0.3,
        num_labels=2,
    )
    torch.manual_seed(0)
    model = (BertForSequenceClassification if pooled else BertModel)(config).to(device).eval()
    step, backend = compiled("torch.compile", model, device)

    def first(**inputs: torch.Tensor) -> torch.Tensor:
        return step(**inputs)[0]

    check(first, lambda **inputs: model(**inputs)[0], device, MANY)
    assert backend.counters.captures == len(LENGTHS)
    assert backend.counters.replays >= len(MANY) - 2 * len(LENGTHS) - 1
    assert not backend.counters.degraded
