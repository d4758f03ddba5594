"""Who runs in a step, and who has which blocks of the cache. Plain Python and deterministic.

Requests that decode come first, then chunks of prompts in what is left of the token budget. A
request gets the blocks of its whole prompt when it is admitted, so that only decoding grows. When a
request that decodes finds no block, the youngest running one is preempted: it gives up its blocks
and later computes again what they held.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0


class BlockTable:
    """The blocks of one request, and the same padded to a row that a step copies as it is."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.row = array("i")

    def __len__(self) -> int:
        return len(self.blocks)

    def widen(self, width: int) -> None:
        """Make room for so many blocks."""
        self.row = array("i", [NULL_BLOCK] * width)

    def add(self, blocks: Sequence[int]) -> None:
        """Append blocks."""
        for index, block in enumerate(blocks, len(self.blocks)):
            self.row[index] = block
        self.blocks += blocks

    def clear(self) -> list[int]:
        """All its blocks, which are no longer its own."""
        blocks, self.blocks = self.blocks, []
        self.widen(len(self.row))
        return blocks


@dataclass(eq=False)
class Request:
    """One request.

    Attributes:
        number: its number; with ``arrival`` it orders requests by age.
        prompt: token ids.
        max_new_tokens: after which it is done.
        arrival: the step at which it comes.
        stop_tokens: it is done after one of these as well.
        tokens: prompt and output so far.
        computed: of how many tokens the cache holds keys and values.
        prefilling: whether it still works on its prompt, or again after a preemption.
        table: its blocks of the cache, in order.
        times: seconds of the clock at which its first and its last token were known.
        preemptions: how often it lost its blocks.
    """

    number: int
    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0
    stop_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    prefilling: bool = True
    table: BlockTable = field(default_factory=BlockTable)
    times: list[float] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        if not self.prompt or self.max_new_tokens < 1:
            raise ValueError(f"request {self.number}: needs a prompt and a token to make")
        self.tokens = list(self.prompt)

    @property
    def age(self) -> tuple[int, int]:
        return self.arrival, self.number

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def longest(self) -> int:
        """Tokens that it may come to hold."""
        return len(self.prompt) + self.max_new_tokens

    def accept(self, tokens: Iterable[int]) -> int:
        """Take new tokens until it is done; how many were taken."""
        before = len(self.tokens)
        for token in tokens:
            if self.done:
                break
            self.tokens.append(token)
        return len(self.tokens) - before

    @property
    def done(self) -> bool:
        new_tokens = len(self.tokens) - len(self.prompt)
        return new_tokens >= self.max_new_tokens or (
            new_tokens > 0 and self.tokens[-1] in self.stop_tokens
        )


class BlockAllocator:
    """The free blocks of a cache; block 0 is never given away."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many blocks, or None and nothing taken if there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks; what was freed last is taken first."""
        self._free += reversed(blocks)


@dataclass(frozen=True)
class Work:
    """A request's part of a step: ``count`` tokens, drafts included, from ``start`` on."""

    request: Request
    start: int
    count: int
    prefill: bool

    @property
    def samples(self) -> bool:
        """Whether a token comes of it: the chunk that ends a prompt does, and all decoding."""
        return not self.prefill or self.start + self.count == len(self.request.tokens)


@dataclass
class Pressure:
    """What a cache that is too small led to."""

    preemptions: int = 0
    full_steps: int = 0  # a request had to wait because no block was free


class Scheduler:
    """Chooses the work of each step.

    Args:
        allocator: of the blocks.
        block_size: tokens in a block.
        width: blocks that a request has at most.
        max_num_reqs: the most requests in a step.
        max_num_tokens: the most tokens in a step.
        draft_tokens: drafts of each request that decodes, each of which needs a slot.

    Raises:
        ValueError: decoding alone can exceed the budget.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        width: int,
        max_num_reqs: int,
        max_num_tokens: int,
        draft_tokens: int = 0,
    ) -> None:
        if max_num_reqs * (1 + draft_tokens) > max_num_tokens:
            wanted = max_num_reqs * (1 + draft_tokens)
            raise ValueError(f"decoding needs up to {wanted} tokens; the budget: {max_num_tokens}")
        self.allocator = allocator
        self.block_size = block_size
        self.width = width
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.draft_tokens = draft_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pressure = Pressure()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the cache could not hold it, were it alone.
        """
        most = self.blocks_for(request.longest + self.draft_tokens)
        has = min(self.allocator.num_blocks - 1, self.width)
        if most > has:
            raise ValueError(f"request {request.number} needs {most} blocks; it can have {has}")
        request.table.widen(self.width)
        self._queue(request)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _queue(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting.sort(key=lambda each: each.age)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Work]:
        """The work of the next step, that of decoding first; empty without requests."""
        work = self._decoding()
        left = self.max_num_tokens - sum(each.count for each in work)
        work += self._started_prompts(left)
        left = self.max_num_tokens - sum(each.count for each in work)
        return work + self._new_prompts(left)

    def _decoding(self) -> list[Work]:
        work = []
        index = 0
        while index < len(self.running):  # the oldest first; victims are taken from the end
            request = self.running[index]
            if not request.prefilling and self._grow(request):
                work.append(Work(request, request.computed, 1 + self.draft_tokens, prefill=False))
            index += 1
        return work

    def _grow(self, request: Request) -> bool:
        """Blocks for the next tokens, by preemption if need be; False if it was preempted.

        And for the drafts after them: those begin before it is known how many tokens are right.
        """
        ahead = 1 + self.draft_tokens
        wanted = request.computed + (2 * ahead if self.draft_tokens else ahead)
        most = request.longest + self.draft_tokens
        while not self._reserve(request, min(wanted, most)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reserve(self, request: Request, tokens: int) -> bool:
        missing = self.blocks_for(tokens) - len(request.table)
        blocks = self.allocator.take(max(missing, 0))
        request.table.add(blocks or ())
        return blocks is not None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.give_back(request.table.clear())
        request.computed, request.prefilling = 0, True
        request.preemptions += 1
        self.pressure.preemptions += 1
        self._queue(request)

    def _started_prompts(self, left: int) -> list[Work]:
        work = []
        for request in self.running:
            missing = len(request.tokens) - request.computed
            if left and request.prefilling:
                work.append(Work(request, request.computed, min(missing, left), prefill=True))
                left -= work[-1].count
        return work

    def _new_prompts(self, left: int) -> list[Work]:
        work = []
        while left and self.waiting and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            if not self._reserve(request, len(request.tokens) + self.draft_tokens + 1):
                self.pressure.full_steps += 1
                break
            self.running.append(self.waiting.pop(0))
            work.append(Work(request, 0, min(len(request.tokens), left), prefill=True))
            left -= work[-1].count
        self.running.sort(key=lambda each: each.age)
        return work

    def finish(self, request: Request) -> None:
        """Take a request that is done out, and free its blocks."""
        self.running.remove(request)
        self.allocator.give_back(request.table.clear())
