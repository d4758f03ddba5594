"""What an entry keeps of the result of a capture."""

import torch

from cgcompile.graphs.capture import capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import kept_output
from cgcompile.torch_compat import raw_memory


def test_results_are_kept_weakly_where_the_pool_holds_them_and_share_what_they_shared(
    pool: GraphPool, device: str
) -> None:
    x = torch.randn(4, 6, device=device)

    def step() -> tuple[object, ...]:
        doubled = x * 2
        return (
            doubled[:, :3],
            {"rest": doubled[:, 3:]},
            x,
            7,
            torch.view_as_complex(x[:, :2]).conj(),
        )

    with torch.inference_mode():
        graph, result = capture(step, pool, "a step")
        life = raw_memory.StorageLife(result[0])
        output, starts = kept_output(result, pool, True)
    one, rest, passed, number, conjugate = output
    assert number == 7
    assert passed is not x  # which the caller has, and may change
    assert passed.data_ptr() == x.data_ptr()
    assert conjugate is not result[4]
    assert conjugate.is_conj()
    mine, theirs = (each.untyped_storage().data_ptr() for each in (one, x))
    assert starts == [mine, mine, theirs, 0, theirs]
    storages = (one.untyped_storage(), rest["rest"].untyped_storage())
    assert raw_memory.storage_identity(storages[0]) == raw_memory.storage_identity(storages[1])
    assert not one.is_inference()
    assert not one.requires_grad
    graph.replay()
    torch.testing.assert_close(one, x[:, :3] * 2)
    torch.testing.assert_close(rest["rest"], x[:, 3:] * 2)
    del result
    assert life.ended  # what is kept holds nothing


def test_results_are_kept_strongly_where_they_shall_outlive_the_caller(
    pool: GraphPool, device: str
) -> None:
    x = torch.randn(4, device=device)
    graph, result = capture(lambda: [x + 1], pool, "a step")
    life = raw_memory.StorageLife(result[0])
    output, _ = kept_output(result, pool, False)
    del result
    assert not life.ended
    graph.replay()
    torch.testing.assert_close(output[0], x + 1)
