"""Ray places the ranks of ``serve_llm.py``: one actor for each, here two that share one model.

Run it from anywhere; it starts Ray in this process, or joins a cluster with ``--address auto``::

    pip install -e ".[examples,ray]"
    python examples/serve_ray.py
    python examples/serve_ray.py --tensor-parallel 2 --data-parallel 2 --device cuda

Ray does what ``torchrun`` does elsewhere: it starts processes where there is room, with a GPU each
under ``--device cuda``. The ranks then meet over torch.distributed alone, and no tensor passes
through Ray. All other arguments are those of ``serve_llm.py``. An actor whose peer has ended raises
an ``AgreementError``, which reaches the caller.
"""

import argparse
import contextlib
import io
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Rank:
    """One process of the group."""

    def address(self) -> dict[str, str]:
        """Where the ranks meet, if this one is the first."""
        import ray

        with socket.socket() as server:
            server.bind(("", 0))
            port = server.getsockname()[1]
        return {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(port)}

    def serve(self, environment: dict[str, str], arguments: Sequence[str]) -> tuple[list[str], str]:
        """Serve the workload; the promises that this rank found broken, and what it printed."""
        import serve_llm

        os.environ.update(environment)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            broken = serve_llm.serve_on_ranks(serve_llm.arguments(arguments))
        return broken, printed.getvalue()


class Ranks:
    """Actors on bundles of a placement group.

    Args:
        count: how many.
        device: ``"cuda"`` for a GPU each.
        strategy: of the placement group: ``"PACK"`` keeps ranks on as few machines as possible.
    """

    def __init__(self, count: int, device: str, strategy: str = "PACK") -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        self._group = placement_group([resources] * count, strategy=strategy)
        ray.get(self._group.ready())
        actor = ray.remote(Rank)
        self.actors = [
            actor.options(
                num_cpus=1,
                num_gpus=int("GPU" in resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(count)
        ]

    def start(self, arguments: Sequence[str]) -> list[Any]:
        """Let all ranks serve; a reference to the result of each."""
        import ray

        first = ray.get(self.actors[0].address.remote())
        # Ray shows each actor its own GPU alone, which is the first one to the actor.
        common = {**first, "WORLD_SIZE": str(len(self.actors)), "LOCAL_RANK": "0"}
        return [
            actor.serve.remote({**common, "RANK": str(rank)}, arguments)
            for rank, actor in enumerate(self.actors)
        ]

    def stop(self) -> None:
        """End the actors and free their bundles."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def connect(address: str | None) -> None:
    """Start Ray in this process, or join a cluster; actors find the examples."""
    import ray

    folder = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    ray.init(address, runtime_env={"env_vars": {"PYTHONPATH": path}}, include_dashboard=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ranks of serve_llm.py as Ray actors.")
    parser.add_argument("--address", help="of a cluster, such as auto; default: one of its own")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--data-parallel", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    args, rest = parser.parse_known_args(argv)
    import ray

    sizes = ["--tensor-parallel", str(args.tensor_parallel)]
    sizes += ["--data-parallel", str(args.data_parallel), "--device", args.device]
    connect(args.address)
    ranks = Ranks(args.tensor_parallel * args.data_parallel, args.device)
    results = ray.get(ranks.start([*sizes, *rest]))
    ranks.stop()
    print(results[0][1], end="")
    return 1 if results[0][0] else 0


if __name__ == "__main__":
    sys.exit(main())
