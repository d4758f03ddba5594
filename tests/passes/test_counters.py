"""The lengths of the layers of a static cache are counted by one op, only where that is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.snapshots import assert_snapshot

import cgcompile
from cgcompile.errors import GuardError
from cgcompile.passes.nodes import short_name, written

B, H, SHARED, L, D = 2, 4, 2, 24, 8


def layer(q, k, v, count, number=1):
    """Attend to the keys that are counted, and count one more."""
    mask = (torch.arange(L) <= count)[None]
    count.add_(number)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _layers(q, k, v, one, two):
    return layer(layer(q, k, v, one).sin(), k, v, two).sin()


def _different_numbers(q, k, v, one, two):
    return layer(layer(q, k, v, one, 2).sin(), k, v, two).sin()


def _a_view_is_read_before(q, k, v, one, two):
    q = q + one.view(1)
    return _layers(q, k, v, one, two)


def _read_after(q, k, v, one, two):
    return _layers(q, k, v, one, two) + one


def _a_view_is_read_after(q, k, v, one, two):
    view = one.view(1)
    return _layers(q, k, v, one, two) + view


def _an_alias_is_read_after(q, k, v, one, two):
    alias = one.detach()
    return _layers(q, k, v, one, two) + alias


def _returned(q, k, v, one, two):
    return _layers(q, k, v, one, two), one


def _a_view_is_returned(q, k, v, one, two):
    view = one.view(1)
    return _layers(q, k, v, one, two), view


def _the_sum_is_used(q, k, v, one, two):
    return _layers(q, k, v, one, two) + two.add_(1)


def _counted_twice(q, k, v, one, two):
    return _layers(q, k, v, one, one) + two


def _set_before(q, k, v, one, two):
    one.fill_(5)
    return _layers(q, k, v, one, two)


def _a_view_is_written_before(q, k, v, one, two):
    one.view(1).mul_(2)
    return _layers(q, k, v, one, two)


def _set_after(q, k, v, one, two):
    result = _layers(q, k, v, one, two)
    one.zero_()
    return result


def _by_a_tensor(q, k, v, one, two):
    result = _layers(q, k, v, one.clone(), two)
    one.add_(two.clone())
    return result


def _scaled(q, k, v, one, two):
    result = _layers(q, k, v, one.clone(), two)
    one.add_(1, alpha=2)
    return result


def _subtracted(q, k, v, one, two):
    result = _layers(q, k, v, one.clone(), two)
    one.sub_(1)
    return result


def _parts_of_one_tensor(q, k, v, one, two):
    both = torch.stack((one, two))
    q = _layers(q, k, v, both[0], both[1])
    one.copy_(both[0])
    two.copy_(both[1])
    return q


def _in_an_eager_region(q, k, v, one, two):
    q = layer(q, k, v, one).sin()
    with cgcompile.eager_region():
        two.add_(1)
    return layer(q, k, v, one.clone())


def _in_inference_mode(q, k, v, one, two):
    with torch.inference_mode():
        one.add_(1)
    return layer(q, k, v, two).sin()


def _under_a_switch(q, k, v, one, two):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        one.add_(1)
    return layer(q, k, v, two).sin()


def _before_an_op_of_a_user(q, k, v, one, two):
    q = layer(q, k, v, one).sin()
    return layer(torch.ops.counters_test.doubled(q), k, v, two)


def _long_queries(q, k, v, one, two):
    return _layers(q.repeat(1, 1, 17, 1), k, v, one, two)


CASES = [value for name, value in list(globals().items()) if name[0] == "_" and callable(value)]


@pytest.fixture
def doubled():
    with torch.library._scoped_library("counters_test", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CPU")
        torch.library.register_fake("counters_test::doubled", torch.empty_like, lib=library)
        yield


def counted(numbers: torch.Tensor | None = None) -> list[torch.Tensor]:
    shapes = (B, H, 1, D), (B, SHARED, L, D), (B, SHARED, L, D)
    counts = torch.randint(0, L, (2,)) if numbers is None else numbers
    return [*(torch.randn(shape) for shape in shapes), counts[0].clone(), counts[1].clone()]


def run(function: Callable[..., Any], make=counted, **settings) -> cgcompile.Backend:
    """Compare a compiled function and what it writes with eager, over several calls."""
    torch._dynamo.reset()
    default = {"compiler": "eager", "kernels": "decode_attention", "capture_device": "host"}
    backend = cgcompile.Backend(**{**default, **settings})
    compiled = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
    torch.manual_seed(0)
    arguments = make()
    with torch.no_grad():
        for _ in range(4):
            fresh = [*make()[:3], *arguments[3:]]
            copies = [argument.clone() for argument in fresh]
            result, expected = compiled(*fresh), function(*copies)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(fresh, copies)
    assert backend.counters.captures > 0
    assert backend.counters.replays > 0
    return backend


def writers(backend: cgcompile.Backend) -> str:
    """Return the nodes that write, with their pieces and what they write."""
    rows = []
    for piece in backend.graphs[-1].split.pieces:
        names = dict(
            zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True)
        )
        for node in piece.module.graph.nodes:
            targets = [names.get(target, "a view") for target in written(piece.module, node)]
            rows += [f"{piece.name}: {short_name(node.target)} {targets}"] if targets else []
    return "\n".join(rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_counters_equal_those_of_eager(case, doubled) -> None:
    backend = run(case)
    assert_snapshot(f"counters/{case.__name__[1:]}", writers(backend))


def test_the_split_has_one_node_that_counts() -> None:
    backend = run(_layers)
    text = backend.graphs[-1].split.text(lines=False)
    assert_snapshot("counters/split", f"{text}\n{writers(backend)}")


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_modes_count_alike(mode) -> None:
    assert writers(run(_layers, cudagraph_mode=mode)).count("_foreach_add_") == 1


def test_an_increment_that_the_user_named_stays() -> None:
    backend = run(_layers, splitting_ops=["aten::add_"])
    assert [line.split()[1] for line in writers(backend).splitlines()] == ["add_", "add_"]


def test_counters_stay_where_attention_does() -> None:
    backend = run(_layers, kernels="-decode_attention")
    assert [line.split()[1] for line in writers(backend).splitlines()] == ["add_", "add_"]


@pytest.mark.parametrize("numbers", [torch.int32, torch.float32], ids=str)
def test_counters_of_another_dtype_stay(numbers) -> None:
    def make():
        return [*counted()[:3], *(torch.tensor(number).to(numbers) for number in (3, 9))]

    assert "_foreach_add_" not in writers(run(_layers, make))


def test_inputs_that_share_memory_stay_in_order() -> None:
    """One input is a part of the other."""

    def function(q, k, v, one, both):
        return layer(q, k, v, one).sin() + both[0]

    torch._dynamo.reset()
    backend = cgcompile.Backend(kernels="decode_attention", compiler="eager", capture_device="host")
    compiled = torch.compile(function, backend=backend, dynamic=False)
    ours, own = torch.tensor([3, 9]), torch.tensor([3, 9])
    with torch.no_grad():
        for _ in range(4):
            inputs = counted()[:3]
            result = compiled(*inputs, ours[0], ours).clone()
            torch.testing.assert_close(result, function(*inputs, own[0], own))
            assert torch.equal(ours, own)
    assert ours[0] == 7
    assert backend.counters.captures > 0
    assert "_foreach_add_" not in writers(backend)


def test_counters_that_share_memory_only_later_are_refused() -> None:
    def function(q, k, v, one, two):
        return layer(q, k, v, one).sin() + two

    torch._dynamo.reset()
    backend = cgcompile.Backend(kernels="decode_attention", compiler="eager", capture_device="host")
    compiled = torch.compile(function, backend=backend, dynamic=False)
    apart = [[torch.tensor(3), torch.tensor(9)] for _ in range(2)]
    memory = torch.tensor([3])
    with torch.no_grad():
        for shares in (False, False, False, True, True, False):
            inputs = counted()[:3]
            if shares:
                with pytest.raises(GuardError, match="share memory"):
                    compiled(*inputs, memory[0], memory[0])
            else:
                result = compiled(*inputs, *apart[0]).clone()
                torch.testing.assert_close(result, function(*inputs, *apart[1]))
                assert apart[0] == apart[1]
    assert memory[0] == 3
    assert "_foreach_add_" in writers(backend)
    assert len(backend.graphs) == 1
    assert backend.counters.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3"])
def test_decode_steps_of_transformers_count_once(family) -> None:
    """With a window of 12 positions of 32, which the steps fill and leave."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 100, "pad_token_id": 0}
    sizes |= {"sliding_window": 12} if family in ("Mistral", "Gemma3") else {}
    if family == "Gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    text = "Text" if family == "Gemma3" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{text}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tokens = torch.randint(1, 100, (2, 16))

    def decoded(call) -> list[torch.Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(tokens[:, :4], past_key_values=cache)
        results = []
        for position in range(4, 16):
            step = tokens[:, position : position + 1]
            results.append(call(step, past_key_values=cache).logits.clone())
            results += [part.cumulative_length.clone() for part in cache.layers]
        return [*results, *(memory for part in cache.layers for memory in (part.keys, part.values))]

    torch._dynamo.reset()
    backend = cgcompile.Backend(kernels="decode_attention", compiler="eager", capture_device="host")
    with torch.inference_mode():
        result = decoded(torch.compile(model.forward, backend=backend))
        torch.testing.assert_close(result, decoded(model), rtol=0, atol=2e-6)
    assert backend.counters.captures > 0
    assert backend.counters.replays > 0
    pieces = backend.graphs[0].split.pieces
    counting = [
        node
        for piece in pieces
        for node in piece.module.graph.nodes
        if any(target.meta["example_value"].dim() == 0 for target in written(piece.module, node))
    ]
    assert [short_name(node.target) for node in counting] == ["_foreach_add_"]
    assert len(counting[0].args[0]) == 3
