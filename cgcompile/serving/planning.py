"""Which graphs a dispatcher may have: the mode that attention allows, and shapes per kind of batch.

Plain Python, and pure: numbers in, descriptors out. A *shape* is a descriptor without its variant
(LoRA, axes). The rules are those of an attention backend that declares how far it goes into a
FULL graph (``AttentionCGSupport``), and of kernels that are planned for an exact number of
requests: a FULL graph of n tokens has min(n, max_num_reqs) requests, a uniform one n / q.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from cgcompile.descriptors import BatchDescriptor, allows_full
from cgcompile.errors import ConfigError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Reason, Why
from cgcompile.serving.variants import whole_numbers
from cgcompile.settings import require_items, require_kind

_WHERE = "CudagraphDispatcher"
_WHOLE = "neither compiled piecewise nor breakable"
_ALWAYS = AttentionCGSupport.ALWAYS

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


class Resolution(NamedTuple):
    """A mode after attention and the model had their say.

    Attributes:
        mode: what is possible.
        query_lens: lengths of uniform decode that may take FULL graphs.
        bounded: graphs for decode of several lengths, up to a bound, may be FULL.
        mixed_why: why batches other than uniform decode have a lesser mode than asked for, or None.
        decode_why: why (some) decode batches have, or None.
    """

    mode: CUDAGraphMode
    query_lens: tuple[int, ...]
    bounded: bool
    mixed_why: Why | None = None
    decode_why: Why | None = None

    @property
    def whys(self) -> tuple[Why, ...]:
        """All that was lost, and why; empty if nothing was."""
        return tuple(why for why in (self.mixed_why, self.decode_why) if why is not None)


def resolve_mode(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    *,
    query_lens: Collection[int] = (1,),
    bounded: bool = False,
    piecewise: bool = True,
    support_why: str = "",
) -> Resolution:
    """The mode that is possible, at most ``mode``, and what was lost on the way.

    FULL graphs for any batch need ALWAYS; else FULL becomes FULL_AND_PIECEWISE, or FULL_DECODE_ONLY
    where ``piecewise`` is False. FULL graphs for uniform decode need UNIFORM_SINGLE_TOKEN_DECODE
    for one token a request, UNIFORM_BATCH for more, and ALWAYS if lengths differ up to a bound;
    each length is judged on its own. If no decode graph remains, the mode is PIECEWISE.

    Args:
        mode: what is asked for.
        support: the least that any attention of the model declares.
        query_lens: lengths of uniform decode, tokens per request.
        bounded: decode of several lengths is wanted too.
        piecewise: the model can run in pieces: it is compiled piecewise, or breakable.
        support_why: which attention it is that declares ``support``, for messages.

    Raises:
        ConfigError: graphs are asked for and none is possible.
    """
    if mode is NONE:
        return Resolution(NONE, (), False)
    wanted, mixed_why, decode_why = mode, None, None
    about = f"attention support is {support.name}" + (f" ({support_why})" if support_why else "")
    if mode is FULL and support is not _ALWAYS:
        mixed_why = Why(Reason.ATTENTION_SUPPORT, f"{about}; FULL for any batch needs ALWAYS")
        mode = BOTH if piecewise else DECODE_ONLY
    elif mode is BOTH and not piecewise:
        mixed_why = Why(
            Reason.NOT_PIECEWISE, "the model is neither compiled piecewise nor breakable"
        )
        mode = DECODE_ONLY
    lengths = tuple(q for q in query_lens if allows_full(support, uniform_shape(q, 1)))
    if mode.separate_routine():
        if not query_lens and not bounded:
            expected = f"at least one length of decode for mode {wanted.name}"
            raise ConfigError.bad_value(
                name="query_lens", where=_WHERE, value=(), expected=expected
            )
        refused = [f"{q} tokens a request" for q in query_lens if q not in lengths]
        refused += ["mixed lengths"] if bounded and support is not _ALWAYS else []
        if refused:
            detail = f"{about}; no FULL graph for decode of {', '.join(refused)}"
            decode_why = Why(Reason.ATTENTION_SUPPORT, detail)
        if not lengths and not (bounded and support is _ALWAYS):
            mode = PIECEWISE
    if mode is PIECEWISE and not piecewise:
        because = f"{about}, and " if wanted is not PIECEWISE else ""
        raise ConfigError.impossible(
            what=f"mode {wanted.name}",
            because=f"{because}the model is {_WHOLE}",
            instead="Take mode NONE, compile the model in mode PIECEWISE, or declare what its "
            "attention supports.",
        )
    separate = mode.separate_routine()
    return Resolution(
        mode, lengths if separate else (), separate and bounded and support is _ALWAYS,
        mixed_why, decode_why,
    )  # fmt: skip


def uniform_shape(query_len: int, num_reqs: int) -> BatchDescriptor:
    """The shape of a decode batch in which each request has ``query_len`` tokens."""
    return BatchDescriptor(query_len * num_reqs, num_reqs, True)


class Limits(NamedTuple):
    """The largest batch: what the static buffers hold."""

    max_num_reqs: int
    max_num_tokens: int

    def sizes(self, name: str, values: Iterable[int]) -> tuple[int, ...]:
        """Sizes sorted, each once; a ConfigError if one is no size, or beyond the limits."""
        found = whole_numbers(name, values)
        if found and found[-1] > self.max_num_tokens:
            expected = f"at most max_num_tokens = {self.max_num_tokens}"
            raise ConfigError.bad_value(name=name, where=_WHERE, value=found[-1], expected=expected)
        return found

    def sizes_of_requests(
        self, name: str, values: Iterable[int], per_request: int, *, exact: bool
    ) -> tuple[int, ...]:
        """Sizes that a batch of requests with (at most) so many tokens each can have."""
        found = self.sizes(name, values)
        if not found:
            raise ConfigError.bad_value(
                name=name, where=_WHERE, value=found, expected="at least one size"
            )
        for size in found:
            if (exact and size % per_request) or size > per_request * self.max_num_reqs:
                kind = f"multiples of {per_request}, " if exact else ""
                expected = f"{kind}at most {per_request} x max_num_reqs = "
                expected += str(per_request * self.max_num_reqs)
                raise ConfigError.bad_value(name=name, where=_WHERE, value=size, expected=expected)
        return found


class Ladders(NamedTuple):
    """The capture sizes of all kinds of batch, checked; in tokens, ascending.

    Attributes:
        sizes: of PIECEWISE graphs, and of FULL graphs for any batch.
        decode: of uniform decode, per query length.
        varlen: of decode of several lengths, per bound.
        limits: the largest batch.
    """

    sizes: tuple[int, ...]
    decode: Mapping[int, tuple[int, ...]]
    varlen: Mapping[int, tuple[int, ...]]
    limits: Limits

    @classmethod
    def of(
        cls,
        sizes: Iterable[int],
        *,
        max_num_reqs: int,
        max_num_tokens: int | None = None,
        query_lens: Iterable[int] | None = None,
        decode_num_reqs: Iterable[int] | None = None,
        decode_sizes: Mapping[int, Iterable[int]] | None = None,
        varlen_decode_sizes: Mapping[int, Iterable[int]] | None = None,
    ) -> "Ladders":
        """The ladders that the arguments of the dispatcher mean, which says what each one is.

        Raises:
            ConfigError: a number is out of range, or two arguments contradict each other.
        """
        for name, rows in (("decode", decode_sizes), ("varlen_decode", varlen_decode_sizes)):
            require_kind(f"{name}_sizes", _WHERE, rows, Mapping, maybe=True)
        if decode_num_reqs is not None:
            require_items("decode_num_reqs", _WHERE, decode_num_reqs)
        sizes = whole_numbers("sizes", sizes)
        whole_numbers("max_num_reqs", (max_num_reqs,))
        given = {q: whole_numbers("decode_sizes", n) for q, n in (decode_sizes or {}).items()}
        varlen = {
            bound: whole_numbers("varlen_decode_sizes", each)
            for bound, each in (varlen_decode_sizes or {}).items()
        }
        whole_numbers("varlen_decode_sizes", varlen)
        default = (1,) if decode_sizes is None else given
        lengths = whole_numbers("query_lens", default if query_lens is None else query_lens)
        counts = None if decode_num_reqs is None else tuple(decode_num_reqs)
        if decode_sizes is not None and (counts is not None or lengths != tuple(sorted(given))):
            raise ConfigError.impossible(
                what="decode_sizes beside decode_num_reqs or other query_lens",
                because="both say which sizes uniform decode has",
                instead="Give decode_sizes alone, or the other two.",
            )
        if max_num_tokens is None:
            most = [q * min(max(counts), max_num_reqs) for q in lengths] if counts else []
            every = (sizes, most, *given.values(), *varlen.values())
            max_num_tokens = max((size for each in every for size in each), default=1)
        whole_numbers("max_num_tokens", (max_num_tokens,))
        limits = Limits(max_num_reqs, max_num_tokens)
        if decode_sizes is None:
            if counts is not None:
                counts = whole_numbers("decode_num_reqs", counts)
            given = {q: _decode_ladder(q, counts, sizes, limits) for q in lengths}
        return cls(
            limits.sizes("sizes", sizes),
            {
                q: limits.sizes_of_requests(f"decode_sizes[{q}]", given[q], q, exact=True)
                for q in lengths
            },
            {
                bound: limits.sizes_of_requests(
                    f"varlen_decode_sizes[{bound}]", each, bound, exact=False
                )
                for bound, each in varlen.items()
            },
            limits,
        )


def _decode_ladder(
    query_len: int, counts: Iterable[int] | None, sizes: Iterable[int], limits: Limits
) -> tuple[int, ...]:
    """Token counts of uniform decode: request counts x query length, and the most that fits.

    Without counts, each of ``sizes`` gives the requests that fit into it, so that no batch is
    padded to more than the next of ``sizes``.
    """
    most = min(limits.max_num_reqs, limits.max_num_tokens // query_len)
    if not most:
        expected = f"at most max_num_tokens = {limits.max_num_tokens}"
        raise ConfigError.bad_value(
            name="query_lens", where=_WHERE, value=query_len, expected=expected
        )
    wanted = (size // query_len for size in sizes) if counts is None else counts
    usable = {count for count in wanted if 0 < count < most}
    return tuple(count * query_len for count in sorted({*usable, most}))


class Shapes(NamedTuple):
    """The shapes to capture, by kind of batch; each list ascends.

    Attributes:
        piecewise: of PIECEWISE graphs: tokens alone.
        mixed: of FULL graphs for any batch.
        decode: of FULL graphs for uniform decode, per query length.
        bounded: of FULL graphs for other decode, per longest query of the batch.
    """

    piecewise: list[BatchDescriptor]
    mixed: list[BatchDescriptor]
    decode: dict[int, list[BatchDescriptor]]
    bounded: dict[int, list[BatchDescriptor]]


def shapes_of(resolution: Resolution, ladders: Ladders) -> Shapes:
    """The shapes that a resolved mode captures.

    Raises:
        ConfigError: the mode needs ``sizes``, and there are none.
    """
    shapes = Shapes([], [], {}, {})
    other = resolution.mode.mixed_mode()
    if other is not NONE and not ladders.sizes:
        expected = f"at least one size for mode {resolution.mode.name}"
        raise ConfigError.bad_value(name="sizes", where=_WHERE, value=(), expected=expected)
    most = ladders.limits.max_num_reqs
    if other is PIECEWISE:
        shapes.piecewise.extend(BatchDescriptor(size) for size in ladders.sizes)
    if other is FULL:
        shapes.mixed.extend(BatchDescriptor(size, min(size, most)) for size in ladders.sizes)
    for q in resolution.query_lens:
        shapes.decode[q] = [uniform_shape(q, size // q) for size in ladders.decode[q]]
    if resolution.bounded:
        shapes.bounded.update(_bounded_shapes(ladders.varlen, most))
    return shapes


def _bounded_shapes(
    ladders: Mapping[int, Iterable[int]], max_num_reqs: int
) -> dict[int, list[BatchDescriptor]]:
    """Per longest query all shapes that serve it, by size, of one size the nearest bound first.

    No query is longer than its batch: a graph of 2 tokens for queries of at most 4 is one for
    queries of at most 2.
    """
    pairs = {(n, min(bound, n)) for bound, sizes in ladders.items() for n in sizes}
    table = {}
    for longest in range(1, max(bound for _, bound in pairs) + 1):
        table[longest] = [
            BatchDescriptor(size, min(size, max_num_reqs), max_query_len=bound)
            for size, bound in sorted(pairs)
            if bound >= longest
        ]
    return table
