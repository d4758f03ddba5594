"""Which errors of ``torch.distributed`` mean that a peer has ended."""

import pytest
import torch.distributed as dist

from cgcompile.torch_compat import torch_ops


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistBackendError("NCCL error: ncclRemoteError: remote process exited"), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: mismatched dtype"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo/transport/"), False),
    ],
)
def test_a_lost_peer_is_told_from_wrong_use(error: Exception, lost: bool) -> None:
    assert torch_ops.is_lost_peer(error) is lost
