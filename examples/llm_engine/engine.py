"""The loop: schedule, draft, run the target, sample, accept. Greedy, and the same in every mode."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cgcompile.serving import Batch
from llm_engine.drafts import Draft
from llm_engine.runner import Runner
from llm_engine.scheduler import Request, Scheduler, Work


@dataclass
class Drafted:
    """What became of drafts.

    Attributes:
        proposed: draft tokens.
        accepted: those that were the target's own choice, and that were taken.
    """

    proposed: int = 0
    accepted: int = 0


class Engine:
    """Serves requests with one target model and perhaps a draft.

    Args:
        runner: of the target, started.
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
        """One step of all requests that have work."""
        work = self.scheduler.schedule()
        prompts = [each for each in work if each.prefill]
        self.mixed_steps += 0 < len(prompts) < len(work)
        deciding = [each.request for each in work if not each.prefill]
        batch, drafts = self._with_drafts(self.runner.batch(work), deciding)
        hidden = self.runner.run(batch)
        sampled, guesses = self._on_host(hidden, work, drafts)
        if self.draft is not None and prompts:
            self.draft.saw(self.runner.batch(prompts))
        self._accept(work, sampled, guesses, time.perf_counter())

    def _with_drafts(
        self, batch: Batch, requests: Sequence[Request]
    ) -> tuple[Batch, torch.Tensor | None]:
        """The batch with drafts [R, k] of the requests that decode, which are first in it."""
        if self.draft is None or not requests:
            return batch, None
        drafts = self.draft.propose(requests, self.scheduler.draft_tokens)
        ids = batch.inputs["input_ids"]
        assert ids is not None
        ids = ids.to(drafts.device)
        rows, k = drafts.shape
        ids[: rows * (k + 1)].view(rows, k + 1)[:, 1:] = drafts
        return replace(batch, inputs={**batch.inputs, "input_ids": ids}), drafts

    def _on_host(
        self, hidden: torch.Tensor, work: Sequence[Work], drafts: torch.Tensor | None
    ) -> tuple[list[int], list[list[int]]]:
        """The target's choice after each row that is sampled, and the drafts: one copy."""
        rows: list[int] = []
        end = 0
        for item in work:
            end += item.count
            if item.samples:
                rows += range(end - 1 if item.prefill else end - item.count, end)
        if len(rows) < len(hidden):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64).to(hidden.device)]
        choices = self.runner.model.greedy(hidden)
        if drafts is None:
            return choices.tolist(), []
        if drafts.device.type == "cpu":
            return choices.tolist(), drafts.tolist()
        both = torch.cat((choices, drafts.flatten())).tolist()
        flat, k = both[len(rows) :], drafts.shape[1]
        return both[: len(rows)], [flat[at : at + k] for at in range(0, len(flat), k)]

    def _accept(
        self, work: Sequence[Work], sampled: list[int], guesses: list[list[int]], now: float
    ) -> None:
        at = 0
        for index, item in enumerate(work):
            request = item.request
            if item.prefill:
                request.computed += item.count
                if not item.samples:
                    continue
                request.prefilling = False
                request.accept(sampled[at : at + 1])
                at += 1
            else:
                choices = sampled[at : at + item.count]
                at += item.count
                self._verify(request, choices, guesses[index] if guesses else [])
            request.times = [*request.times[:1], now]
            if request.done:
                self.scheduler.finish(request)

    def _verify(self, request: Request, choices: list[int], guesses: list[int]) -> None:
        """Take the guesses that are the target's choice, and its choice after them."""
        right = 0
        while right < len(guesses) and guesses[right] == choices[right]:
            right += 1
        taken = request.accept(choices[: right + 1])
        request.computed += taken  # the last one taken is not in the cache yet
        self.drafted.proposed += len(guesses)
        self.drafted.accepted += min(right, taken)
