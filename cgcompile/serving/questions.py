"""What a user may ask a manager before a step: :class:`Questions`, answered by the dispatcher."""

from typing import Any

from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.steps import Batch
from cgcompile.serving.tables import Dispatched

NONE = CUDAGraphMode.NONE


class Questions:
    """The part of a manager that only looks things up; ranks have not agreed on it.

    Attributes:
        dispatcher: which graphs there are to be, and which of them serves a batch.
    """

    dispatcher: CudagraphDispatcher

    def needs_capture(self) -> bool:
        """Whether any graph is planned."""
        return bool(self.dispatcher.plan())

    def get_cudagraph_size(self, num_tokens: int, uniform_decode: bool = False) -> int | None:
        """The padded size of the graph that serves so many tokens; None if none does."""
        found = self.dispatcher.dispatch(num_tokens, uniform_decode=uniform_decode)
        return None if found.mode is NONE else found.descriptor.num_tokens

    def get_cudagraph_runtime_mode(
        self, num_reqs: int, num_tokens: int, max_query_len: int
    ) -> tuple[CUDAGraphMode, int | None]:
        """(runtime mode, padded size) of a batch; (NONE, None) where no graph serves it.

        Uniform decode is what has ``max_query_len`` tokens a request, a length that the dispatcher
        has. Prompts of equal length look the same: who knows better asks :meth:`dispatched`.
        """
        uniform = num_tokens == max_query_len * num_reqs
        uniform &= max_query_len in self.dispatcher.query_lens
        found = self.dispatcher.dispatch(num_tokens, num_reqs, max_query_len, uniform)
        return (NONE, None) if found.mode is NONE else (found.mode, found.descriptor.num_tokens)

    def dispatched(self, batch: Batch, **restrictions: Any) -> Dispatched:
        """What a batch would run as; see :meth:`run`."""
        return self.dispatcher.dispatch(**batch.numbers(), **restrictions)
