"""The loop: schedule, draft, run the target, sample, accept. Greedy, and the same in every mode."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_engine.drafts import Draft
from llm_engine.runner import Runner
from llm_engine.scheduler import Request, Scheduler, Work


@dataclass
class Drafted:
    """What became of drafts.

    Attributes:
        proposed: draft tokens.
        accepted: those that were the target's own choice, and that were taken.
        rounds: verifications of the drafts of one request.
    """

    proposed: int = 0
    accepted: int = 0
    rounds: int = 0


class Copy:
    """A copy of a small tensor to the host, which waits for it and not for what is queued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> list[list[int]]:
        """The rows, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows


class Engine:
    """Serves requests with one target model and perhaps a draft.

    Args:
        runner: of the target, started, with ``sampled`` rows: one and the draft tokens.
        scheduler: with the draft tokens that ``draft`` proposes.
        draft: what guesses, if the scheduler leaves room for drafts.

    Raises:
        ValueError: draft tokens without a draft, or a draft without them.

    Attributes:
        mixed_steps: with chunks of prompts beside decoding.
        drafted: what became of drafts.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, draft: Draft | None = None) -> None:
        if (draft is None) != (scheduler.draft_tokens == 0):
            raise ValueError("a draft and draft tokens go together")
        self.runner = runner
        self.scheduler = scheduler
        self.draft = draft
        self.mixed_steps = 0
        self.drafted = Drafted()

    def serve(self, requests: Sequence[Request]) -> None:
        """Run until all requests of all ranks are done. They arrive by the number of the step."""
        coming = sorted(requests, key=lambda each: each.age, reverse=True)
        step = 0
        with torch.inference_mode():
            while coming or self.scheduler.busy:
                if not self.scheduler.busy:
                    step = max(step, coming[-1].arrival)
                while coming and coming[-1].arrival <= step:
                    self.scheduler.add(coming.pop())
                self.step()
                step += 1
            while self.runner.run_idle():
                pass

    def step(self) -> None:
        """One step of all requests that have work. It waits once, for what the target chose."""
        work = self.scheduler.schedule()
        prompts = [item for item in work if item.prefill]
        self.mixed_steps += 0 < len(prompts) < len(work)
        deciding = [item.request for item in work if not item.prefill]
        drafts = None
        if self.draft is not None and deciding:
            drafts = self.draft.propose(deciding, self.scheduler.draft_tokens)
        result = self.runner.run(self.runner.batch(work, drafts))
        choices = Copy(result["choices"])
        if self.draft is not None:
            self.draft.follow(work, result["begin"])
        self._accept(work, choices.wait(), time.perf_counter())

    def _accept(self, work: Sequence[Work], choices: list[list[int]], now: float) -> None:
        """Take the new tokens: of each request the choices, and the number of right drafts."""
        for item, (*tokens, right) in zip(work, choices, strict=True):
            request = item.request
            if item.prefill:
                request.computed += item.count
                if not item.samples:
                    continue
                request.prefilling = False
                request.accept(tokens[:1])
            else:
                self._verify(request, tokens, right)
            request.times = [*request.times[:1], now]
            if request.done:
                self.scheduler.finish(request)

    def _verify(self, request: Request, choices: list[int], right: int) -> None:
        """Take the right drafts, which are choices of the target, and its choice after them."""
        taken = request.accept(choices[: right + 1])
        request.computed += taken  # the last one taken is not in the cache yet
        if self.draft is not None:
            self.drafted.rounds += 1
            self.drafted.proposed += len(choices) - 1
            self.drafted.accepted += min(right, taken)
