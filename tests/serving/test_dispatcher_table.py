"""Every cell of mode x kind of batch, to be read. To accept a change: ``EXPECTTEST_ACCEPT=1``."""

from expecttest import assert_expected_inline
from lib.oracles import ALWAYS, EVERY_MODE, Batch, Mode, decode, dispatcher, short

from cgcompile import AttentionCGSupport
from cgcompile.serving.plan import Axis, LoraCases

BATCHES = {
    "decode 1": decode(1),
    "decode 5": decode(5),
    "decode 8": decode(8),
    "decode 9, too many": decode(9),
    "mixed 3 req 7 tok": Batch(7, 3, 4),
    "prefill 1 req 7 tok": Batch(7, 1, 7),
    "prefill 2 req 3 + 3": Batch(6, 2, 3),
    "tokens alone": Batch(7),
    "mixed 9 req 11 tok": Batch(11, 9, 3),
    "oversize": Batch(40, 3, 30),
    "with LoRA": decode(5, has_lora=True, num_active_loras=1),
    "no tokens": Batch(0),
    "no requests": Batch(0, 0),
}
SPECULATIVE = {
    "decode 1 x 1": decode(1),
    "decode 3 x 1": decode(3),
    "decode 1 x 3": decode(1, 3),
    "decode 5 x 3": decode(5, 3),
    "decode 6 x 3, too many": decode(6, 3),
    "decode 2 x 2, unlisted": decode(2, 2),
    "mixed 3 req 11 tok": Batch(11, 3, 5),
    "uneven 3 req 7 tok": Batch(7, 3, 3),
}


def table(rows: dict[str, list[str]], head: list[str]) -> str:
    lines = [["batch", *head], *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def by_mode(batches: dict[str, Batch], limits=None, **settings) -> str:
    each = [dispatcher(mode, **settings) for mode in EVERY_MODE]
    rows = {
        name: [short(batch.through(found, **(limits or {}))) for found in each]
        for name, batch in batches.items()
    }
    return table(rows, [mode.name for mode in EVERY_MODE])


def test_one_token_a_request() -> None:
    assert_expected_inline(
        by_mode(BATCHES),
        """\
batch                NONE                  PIECEWISE                  FULL                       FULL_DECODE_ONLY           FULL_AND_PIECEWISE
decode 1             NONE(1t) mode_none    PW(1t)                     FULL(1t,1r)                FULL(1t,1r,u1)             FULL(1t,1r,u1)
decode 5             NONE(5t) mode_none    PW(8t)                     FULL(8t,8r)                FULL(8t,8r,u1)             FULL(8t,8r,u1)
decode 8             NONE(8t) mode_none    PW(8t)                     FULL(8t,8r)                FULL(8t,8r,u1)             FULL(8t,8r,u1)
decode 9, too many   NONE(9t) mode_none    PW(16t)                    NONE(9t) oversize          NONE(9t) oversize          PW(16t) oversize
mixed 3 req 7 tok    NONE(7t) mode_none    PW(8t)                     FULL(8t,8r)                NONE(7t) mixed_batch       PW(8t)
prefill 1 req 7 tok  NONE(7t) mode_none    PW(8t)                     FULL(8t,8r)                NONE(7t) mixed_batch       PW(8t)
prefill 2 req 3 + 3  NONE(6t) mode_none    PW(8t)                     FULL(8t,8r)                NONE(6t) mixed_batch       PW(8t)
tokens alone         NONE(7t) mode_none    PW(8t)                     FULL(8t,8r)                NONE(7t) mixed_batch       PW(8t)
mixed 9 req 11 tok   NONE(11t) mode_none   PW(16t)                    NONE(11t) oversize         NONE(11t) mixed_batch      PW(16t)
oversize             NONE(40t) mode_none   NONE(40t) oversize         NONE(40t) oversize         NONE(40t) mixed_batch      NONE(40t) oversize
with LoRA            NONE(5t) mode_none    NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant
no tokens            NONE(0t) empty_batch  NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch
no requests          NONE(0t) empty_batch  NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch""",
    )


def test_speculative_decode() -> None:
    assert_expected_inline(
        by_mode(SPECULATIVE, query_lens=(1, 3)),
        """\
batch                   NONE                 PIECEWISE           FULL                FULL_DECODE_ONLY       FULL_AND_PIECEWISE
decode 1 x 1            NONE(1t) mode_none   PW(1t)              FULL(1t,1r)         FULL(1t,1r,u1)         FULL(1t,1r,u1)
decode 3 x 1            NONE(3t) mode_none   PW(4t)              FULL(4t,4r)         FULL(4t,4r,u1)         FULL(4t,4r,u1)
decode 1 x 3            NONE(3t) mode_none   PW(4t)              FULL(4t,4r)         FULL(3t,1r,u3)         FULL(3t,1r,u3)
decode 5 x 3            NONE(15t) mode_none  PW(16t)             FULL(16t,8r)        FULL(15t,5r,u3)        FULL(15t,5r,u3)
decode 6 x 3, too many  NONE(18t) mode_none  NONE(18t) oversize  NONE(18t) oversize  NONE(18t) oversize     NONE(18t) oversize
decode 2 x 2, unlisted  NONE(4t) mode_none   PW(4t)              FULL(4t,4r)         NONE(4t) query_length  PW(4t) query_length
mixed 3 req 11 tok      NONE(11t) mode_none  PW(16t)             FULL(16t,8r)        NONE(11t) mixed_batch  PW(16t)
uneven 3 req 7 tok      NONE(7t) mode_none   PW(8t)              FULL(8t,8r)         NONE(7t) mixed_batch   PW(8t)""",
    )


def test_full_excluded() -> None:
    """As for a step whose attention cannot be captured, such as cascade attention."""
    found = by_mode(BATCHES, {"invalid_modes": {Mode.FULL}})
    assert_expected_inline(
        found,
        """\
batch                NONE                  PIECEWISE                  FULL                       FULL_DECODE_ONLY           FULL_AND_PIECEWISE
decode 1             NONE(1t) mode_none    PW(1t)                     NONE(1t) mode_excluded     NONE(1t) mode_excluded     PW(1t) mode_excluded
decode 5             NONE(5t) mode_none    PW(8t)                     NONE(5t) mode_excluded     NONE(5t) mode_excluded     PW(8t) mode_excluded
decode 8             NONE(8t) mode_none    PW(8t)                     NONE(8t) mode_excluded     NONE(8t) mode_excluded     PW(8t) mode_excluded
decode 9, too many   NONE(9t) mode_none    PW(16t)                    NONE(9t) oversize          NONE(9t) oversize          PW(16t) oversize
mixed 3 req 7 tok    NONE(7t) mode_none    PW(8t)                     NONE(7t) mode_excluded     NONE(7t) mixed_batch       PW(8t)
prefill 1 req 7 tok  NONE(7t) mode_none    PW(8t)                     NONE(7t) mode_excluded     NONE(7t) mixed_batch       PW(8t)
prefill 2 req 3 + 3  NONE(6t) mode_none    PW(8t)                     NONE(6t) mode_excluded     NONE(6t) mixed_batch       PW(8t)
tokens alone         NONE(7t) mode_none    PW(8t)                     NONE(7t) mode_excluded     NONE(7t) mixed_batch       PW(8t)
mixed 9 req 11 tok   NONE(11t) mode_none   PW(16t)                    NONE(11t) oversize         NONE(11t) mixed_batch      PW(16t)
oversize             NONE(40t) mode_none   NONE(40t) oversize         NONE(40t) oversize         NONE(40t) mixed_batch      NONE(40t) oversize
with LoRA            NONE(5t) mode_none    NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant
no tokens            NONE(0t) empty_batch  NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch
no requests          NONE(0t) empty_batch  NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch       NONE(0t) empty_batch""",
    )


def test_what_attention_supports() -> None:
    rows, head = {}, ["mode", "decode 5 x 1", "decode 5 x 3", "mixed 7", "lost"]
    for mode in (Mode.PIECEWISE, Mode.FULL, Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE):
        for support in AttentionCGSupport:
            found = dispatcher(mode, query_lens=(1, 3), support=support)
            cells = [short(batch.through(found)) for batch in (decode(5), decode(5, 3), Batch(7))]
            lost = "; ".join(why.detail for why in found.degraded)
            rows[f"{mode.name}, {support.name}"] = [found.mode.name, *cells, lost]
    assert_expected_inline(
        table(rows, head),
        """\
batch                                            mode                decode 5 x 1              decode 5 x 3                 mixed 7                   lost
PIECEWISE, NEVER                                 PIECEWISE           PW(8t)                    PW(16t)                      PW(8t)
PIECEWISE, UNIFORM_SINGLE_TOKEN_DECODE           PIECEWISE           PW(8t)                    PW(16t)                      PW(8t)
PIECEWISE, UNIFORM_BATCH                         PIECEWISE           PW(8t)                    PW(16t)                      PW(8t)
PIECEWISE, ALWAYS                                PIECEWISE           PW(8t)                    PW(16t)                      PW(8t)
FULL, NEVER                                      PIECEWISE           PW(8t) attention_support  PW(16t) attention_support    PW(8t) attention_support  attention support is NEVER; FULL for any batch needs ALWAYS; attention support is NEVER; no FULL graph for decode of 1 tokens a request, 3 tokens a request
FULL, UNIFORM_SINGLE_TOKEN_DECODE                FULL_AND_PIECEWISE  FULL(8t,8r,u1)            PW(16t) attention_support    PW(8t) attention_support  attention support is UNIFORM_SINGLE_TOKEN_DECODE; FULL for any batch needs ALWAYS; attention support is UNIFORM_SINGLE_TOKEN_DECODE; no FULL graph for decode of 3 tokens a request
FULL, UNIFORM_BATCH                              FULL_AND_PIECEWISE  FULL(8t,8r,u1)            FULL(15t,5r,u3)              PW(8t) attention_support  attention support is UNIFORM_BATCH; FULL for any batch needs ALWAYS
FULL, ALWAYS                                     FULL                FULL(8t,8r)               FULL(16t,8r)                 FULL(8t,8r)
FULL_DECODE_ONLY, NEVER                          PIECEWISE           PW(8t) attention_support  PW(16t) attention_support    PW(8t)                    attention support is NEVER; no FULL graph for decode of 1 tokens a request, 3 tokens a request
FULL_DECODE_ONLY, UNIFORM_SINGLE_TOKEN_DECODE    FULL_DECODE_ONLY    FULL(8t,8r,u1)            NONE(15t) attention_support  NONE(7t) mixed_batch      attention support is UNIFORM_SINGLE_TOKEN_DECODE; no FULL graph for decode of 3 tokens a request
FULL_DECODE_ONLY, UNIFORM_BATCH                  FULL_DECODE_ONLY    FULL(8t,8r,u1)            FULL(15t,5r,u3)              NONE(7t) mixed_batch
FULL_DECODE_ONLY, ALWAYS                         FULL_DECODE_ONLY    FULL(8t,8r,u1)            FULL(15t,5r,u3)              NONE(7t) mixed_batch
FULL_AND_PIECEWISE, NEVER                        PIECEWISE           PW(8t) attention_support  PW(16t) attention_support    PW(8t)                    attention support is NEVER; no FULL graph for decode of 1 tokens a request, 3 tokens a request
FULL_AND_PIECEWISE, UNIFORM_SINGLE_TOKEN_DECODE  FULL_AND_PIECEWISE  FULL(8t,8r,u1)            PW(16t) attention_support    PW(8t)                    attention support is UNIFORM_SINGLE_TOKEN_DECODE; no FULL graph for decode of 3 tokens a request
FULL_AND_PIECEWISE, UNIFORM_BATCH                FULL_AND_PIECEWISE  FULL(8t,8r,u1)            FULL(15t,5r,u3)              PW(8t)
FULL_AND_PIECEWISE, ALWAYS                       FULL_AND_PIECEWISE  FULL(8t,8r,u1)            FULL(15t,5r,u3)              PW(8t)""",
    )


def test_lora() -> None:
    """Columns: which LoRA cases are captured. One graph for all serves a batch without LoRA too."""
    cases = {
        "none": LoraCases(),
        "specialised(4)": LoraCases.specialised(4),
        "shared(4)": LoraCases.shared(4),
        "shared(4), without": LoraCases.shared(4, without=True),
    }
    rows = {}
    for active in (None, 0, 1, 3, 4, 5, 6):
        batch = decode(5, has_lora=active is not None, num_active_loras=active or 0)
        name = "no LoRA" if active is None else f"{active or 'uncounted'} active"
        rows[name] = [short(batch.through(dispatcher(lora=lora))) for lora in cases.values()]
    assert_expected_inline(
        table(rows, list(cases)),
        """\
batch             none                       specialised(4)             shared(4)                  shared(4), without
no LoRA           FULL(8t,8r,u1)             FULL(8t,8r,u1)             FULL(8t,8r,u1,L5)          FULL(8t,8r,u1)
uncounted active  NONE(5t) unlisted_variant  FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)
1 active          NONE(5t) unlisted_variant  FULL(8t,8r,u1,L1)          FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)
3 active          NONE(5t) unlisted_variant  FULL(8t,8r,u1,L4)          FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)
4 active          NONE(5t) unlisted_variant  FULL(8t,8r,u1,L4)          FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)
5 active          NONE(5t) unlisted_variant  FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)          FULL(8t,8r,u1,L5)
6 active          NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant  NONE(5t) unlisted_variant""",
    )


def test_axes() -> None:
    axes = [Axis("kernel", ["a", "b"]), Axis("max_seqlen", [512, 4096], "pad_up")]
    found = dispatcher(sizes=[8], axes=[*axes, Axis("step", rule="ignored")])
    extras = [("a", 1, 7), ("a", 512, 7), ("b", 513, 8), ("b", 4097, 8), ("c", 1, 8)]
    rows = {str(extra): [short(found.dispatch(5, extra=extra))] for extra in extras}
    assert_expected_inline(
        table(rows, ["graph"]),
        """\
batch           graph
('a', 1, 7)     PW(8t,('a', 512, None))
('a', 512, 7)   PW(8t,('a', 512, None))
('b', 513, 8)   PW(8t,('b', 4096, None))
('b', 4097, 8)  NONE(5t) unlisted_variant
('c', 1, 8)     NONE(5t) unlisted_variant""",
    )


def test_axes_of_full_graphs_alone() -> None:
    """PIECEWISE graphs are not multiplied by what pieces do not see, and serve all of it."""
    axes = [Axis("kernel", ["a", "b"], full_only=True), Axis("embeds", [False, True])]
    found = dispatcher(Mode.FULL_AND_PIECEWISE, sizes=[8], axes=axes, support=ALWAYS)
    assert [(mode.name, key.extra) for mode, key in found.plan()] == [
        ("PIECEWISE", (None, True)),
        ("PIECEWISE", (None, False)),
        *(("FULL", (kernel, embeds)) for kernel in "ba" for embeds in (True, False)),
    ]
    rows = {}
    for extra in [("a", True), ("b", False), ("c", True), ("a", None), ("c", None)]:
        kinds = {"decode": dict(num_reqs=5, uniform_decode=True), "mixed": dict(num_reqs=2)}
        said = [found.dispatch(5, extra=extra, **kind) for kind in kinds.values()]
        said.append(found.dispatch(9, extra=extra))
        said.append(found.dispatch(5, extra=extra, invalid_modes=[Mode.PIECEWISE]))
        rows[str(extra)] = [short(each) for each in said]
    assert_expected_inline(
        table(rows, ["decode", "mixed", "oversize", "no PIECEWISE"]),
        """\
batch         decode                                mixed                                 oversize                   no PIECEWISE
('a', True)   FULL(8t,8r,u1,('a', True))            PW(8t,(None, True))                   NONE(9t) oversize          NONE(5t) mode_excluded
('b', False)  FULL(8t,8r,u1,('b', False))           PW(8t,(None, False))                  NONE(9t) oversize          NONE(5t) mode_excluded
('c', True)   PW(8t,(None, True)) unlisted_variant  PW(8t,(None, True)) unlisted_variant  NONE(9t) unlisted_variant  NONE(5t) unlisted_variant
('a', None)   NONE(5t) unlisted_variant             NONE(5t) unlisted_variant             NONE(9t) unlisted_variant  NONE(5t) unlisted_variant
('c', None)   NONE(5t) unlisted_variant             NONE(5t) unlisted_variant             NONE(9t) unlisted_variant  NONE(5t) unlisted_variant""",
    )
    found = dispatcher(Mode.FULL, sizes=[8], axes=axes, support=ALWAYS)
    assert short(found.dispatch(5, extra=("c", True))) == "NONE(5t) unlisted_variant"


def test_decode_of_several_lengths() -> None:
    found = dispatcher(
        Mode.FULL_DECODE_ONLY, varlen_decode_sizes={4: [4, 16], 2: [4]}, support=ALWAYS
    )
    batches = {
        "3 tok, longest 2": Batch(3, 2, 2),
        "3 tok, longest 3": Batch(3, 1, 3),
        "3 tok, longest unknown": Batch(3, 2),
        "9 tok, longest 2": Batch(9, 8, 2),
        "9 tok, longest 4": Batch(9, 4, 4),
        "9 tok, longest 5": Batch(9, 4, 5),
        "9 tok, 9 requests": Batch(9, 9, 1),
        "decode 3 x 1": decode(3),
        "decode 5 x 1": decode(5),
        "decode 5 x 2": decode(5, 2),
        "decode 9 x 2": decode(9, 2),
        "decode 2 x 5": decode(2, 5),
    }
    rows = {name: [short(batch.through(found))] for name, batch in batches.items()}
    assert_expected_inline(
        table(rows, ["graph"]),
        """\
batch                   graph
3 tok, longest 2        FULL(4t,4r,<=2)
3 tok, longest 3        FULL(4t,4r,<=4)
3 tok, longest unknown  NONE(3t) mixed_batch
9 tok, longest 2        FULL(16t,8r,<=4)
9 tok, longest 4        FULL(16t,8r,<=4)
9 tok, longest 5        NONE(9t) mixed_batch
9 tok, 9 requests       NONE(9t) mixed_batch
decode 3 x 1            FULL(4t,4r,u1)
decode 5 x 1            FULL(8t,8r,u1)
decode 5 x 2            FULL(16t,8r,<=4)
decode 9 x 2            NONE(18t) oversize
decode 2 x 5            NONE(10t) query_length""",
    )
