"""Ranks of one engine: replicas that share the requests, the layers of each split over ranks.

``torchrun`` starts the processes, on one machine or on several; a mesh of two dimensions, data and
tensor, gives each its place. The weights of a replica become DTensors: of the first matrix of each
pair a rank has columns, of the second rows, so that one all-reduce follows each pair. Embedding and
head stay whole, so that sampling has no collective. Replicas share nothing but the choice of the
graph, by one :class:`cgcompile.serving.Agreement` of all ranks.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from cgcompile.serving import Agreement, CudagraphDispatcher
from llm_engine.model import Layer, Llama
from llm_engine.scheduler import Request

SPLIT: dict[str, ParallelStyle] = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "gate_up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class RanksError(ValueError):
    """A number of processes, or a model, that cannot be split as asked."""


class Ranks:
    """This process and its peers.

    Args:
        tensor: ranks that a replica is split over.
        data: replicas.
        device: its type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, a GPU for each rank).
        seconds: after which a rank that does not answer is an error.

    Raises:
        RanksError: there are not ``tensor * data`` processes.

    Attributes:
        rank: of this process.
        device: of this process.
        replica: the number of this rank's replica.
    """

    def __init__(self, tensor: int, data: int, device: str, seconds: float = 600) -> None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != tensor * data:
            raise RanksError(
                f"{tensor} x {data} ranks need as many processes, not {world_size}: "
                f"torchrun --nproc-per-node {tensor * data} examples/serve_llm.py ..."
            )
        timeout = timedelta(seconds=seconds)
        self.device = torch.device(device)
        options: dict[str, Any] = {}
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
            options["device_id"] = self.device
        backend = "nccl" if options else "gloo"
        dist.init_process_group(backend, timeout=timeout, **options)
        mesh = init_device_mesh(self.device.type, (data, tensor), mesh_dim_names=("data", "tensor"))
        self.rank = dist.get_rank()
        self.replica, self._data = mesh.get_local_rank("data"), data
        self._tensor, self._mesh = tensor, mesh["tensor"]
        # Ranks agree by the CPU: it works while GPUs run, and an ended process is found at once.
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    def agreement(self, dispatcher: CudagraphDispatcher) -> Agreement:
        """Of all ranks, about the graphs of a dispatcher."""
        return Agreement(dispatcher, self._control)

    def share(self, requests: Sequence[Request]) -> list[Request]:
        """Those that this replica serves: all of its ranks take the same."""
        return list(requests[self.replica :: self._data])

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._control)
        return values

    def split(self, model: Llama) -> Llama:
        """Make the weights of each layer DTensors, of which this rank holds its part.

        Raises:
            RanksError: heads or columns cannot be split evenly.
        """
        config, ranks = model.config, self._tensor
        for size in (config.heads, config.kv_heads, config.intermediate):
            if size % ranks:
                raise RanksError(f"a replica of {ranks} ranks cannot split {size} heads or columns")
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        for layer in layers:
            attention = layer.attention
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            _reorder(attention.qkv, sizes, ranks)
            _reorder(layer.gate_up, [config.intermediate] * 2, ranks)
            attention.q_size //= ranks
            attention.kv_size //= ranks
            # Every rank has drawn or read the same weights: no rank has to send them.
            parallelize_module(layer, self._mesh, SPLIT, src_data_rank=None)
        with torch.inference_mode():  # the first call connects ranks, which no capture can hold
            row = model.embed.weight[:1]
            row + layers[0].mlp(row)  # waits
        return model.requires_grad_(False)  # DTensors are new parameters

    def close(self) -> None:
        """Leave the process groups. Graphs that hold collectives must be released before."""
        dist.destroy_process_group()


def _reorder(linear: torch.nn.Linear, sizes: Sequence[int], ranks: int) -> None:
    """Order the rows of several matrices in one, so that equal chunks hold a part of each."""
    parts = [part.chunk(ranks) for part in linear.weight.data.split(list(sizes))]
    linear.weight.data = torch.cat([part[rank] for rank in range(ranks) for part in parts])
