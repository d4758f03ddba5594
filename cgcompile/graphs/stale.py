"""Results that raise where they are read after a later step has overwritten their memory.

For ``debug=True`` alone: each result gets a storage of its own over the memory of the graph, and
before a step overwrites that memory the storage is set to raise. Views that the caller made of the
result share its storage, and raise as well. Graphs and eager segments read through other storages.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import ConfigError, stale_result
from cgcompile.graphs.arena import address


def check_debug(debug: bool) -> None:
    """Refuse ``debug`` where this build of torch cannot make a storage raise."""
    if debug and not compat.can_expire_storages():
        raise ConfigError.impossible(
            what="debug = True",
            because="this torch was built without the function that makes a result raise",
            instead="Use a build of torch with CUDA, or poison=True.",
        )


_Result = tuple[torch.UntypedStorage, torch.UntypedStorage, Callable[..., str]]


class StaleResults:
    """The results that callers may hold, by the owner of their memory."""

    def __init__(self) -> None:
        # By owner: the storage of a result, which does not keep the memory; that of the step's
        # result, which keeps it after a capture; what makes the text of the error of a touch.
        self._results: dict[Hashable, list[_Result]] = {}
        self._steps = 0

    def track(
        self, leaves: Sequence[Any], owns: Callable[[int], bool], owner: Hashable, what: str
    ) -> list[Any]:
        """Return the leaves of a result, those that ``owns`` accepts with own storages."""
        self._steps += 1
        known: dict[int, torch.UntypedStorage] = {}  # results that share memory share a storage
        results = self._results.setdefault(owner, [])

        def own(item: int, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not owns(address(leaf)):
                return leaf
            start, nbytes = address(leaf), leaf.untyped_storage().nbytes()
            if start not in known:
                known[start] = compat.weak_storage(start, nbytes, leaf.device)
                text = partial(stale_result, item, what, self._steps)
                results.append((known[start], leaf.untyped_storage(), text))
            return compat.laid_over(known[start], leaf)

        return [own(item, leaf) for item, leaf in enumerate(leaves)]

    def expire(self, owner: Hashable, inputs: Iterable[Any] = (), released: bool = False) -> None:
        """Make the results of an owner raise, except ``inputs`` of its step that runs next."""
        tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        read = {compat.storage_identity(tensor.untyped_storage()) for tensor in tensors}
        results, self._results[owner] = self._results.get(owner, []), []
        for result in results:
            storage, _, text = result
            if compat.storage_identity(storage) in read:
                self._results[owner].append(result)
            else:
                compat.expire_storage(storage, text(released=released))

    def clear(self) -> None:
        """Make all results raise: their memory is released."""
        for owner in [*self._results]:
            self.expire(owner, released=True)
        self._results.clear()

    def origin(self, identity: int) -> int:
        """Return the identity of the storage that a result was made of; ``identity`` otherwise."""
        for storage, origin, _ in chain.from_iterable(self._results.values()):
            if compat.storage_identity(storage) == identity:
                return compat.storage_identity(origin)
        return identity
