"""A small engine with continuous batching serves a Llama in every CUDA graph mode.

Run it from anywhere; without a checkpoint the weights are random and nothing is downloaded::

    pip install -e ".[examples]"
    python examples/serve_llm.py
    python examples/serve_llm.py --model FOLDER_WITH_A_LLAMA
    python examples/serve_llm.py --device cuda --dtype bfloat16 --hidden 2048 --intermediate 5632 \\
        --layers 16 --heads 32 --kv-heads 8 --vocab 32000 --requests 256 --prompt 512 \\
        --tokens 128 --max-reqs 128 --budget 2048 --block-size 16

Speculative decoding beside plain decoding: the four drafts of a round are one graph, and so is
their verification. Layers of random weights add little behind those of the draft, so that it is
right as often as a trained one::

    python examples/serve_llm.py --speculative
    python examples/serve_llm.py --speculative --device cuda --dtype bfloat16 --hidden 2048 \\
        --intermediate 8192 --layers 16 --heads 32 --kv-heads 8 --vocab 128256 --requests 16 \\
        --prompt 64 --tokens 256 --max-reqs 8 --budget 512 --block-size 16 --blocks 512

Requests arrive over time and share a paged key-value cache. A step decodes for all that have their
prompt behind them and works on chunks of prompts in what is left of its budget; where the cache is
full, requests wait, and the youngest is preempted. The same workload is served in each mode, then
with drafts that the target verifies (speculative decoding): random ones, n-grams, and those of a
smaller model, which has managers of its own. Without a GPU cgcompile's host recorder takes the
place of CUDA graphs: same rules, no speed. The parts are in ``llm_engine/``.

Replicas that share the requests, each split over several ranks, on one machine or on two; with
``--device cuda`` each rank has a GPU, and NCCL::

    torchrun --nproc-per-node 4 examples/serve_llm.py --tensor-parallel 2 --data-parallel 2
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 2 \\
        examples/serve_llm.py --tensor-parallel 2 --data-parallel 2  # and on the other: rank 1

The script exits with 1 if one of these promises is broken:

* every request gets the same greedy tokens in all modes, with any draft; where they differ, the
  distance of the two logits is printed (``--close-calls`` allows some, for bfloat16 and long runs);
* on several ranks, these are the tokens of one process without graphs;
* at least 95 % of uniform decode steps are one FULL graph, where the mode has such graphs;
* every step that was given a graph replayed it;
* some n-grams are accepted;
* requests end, and give their blocks back;
* unless ``--blocks`` gives a cache of one's own size: a step mixes prompts and decoding, requests
  wait for blocks, and some are preempted.
"""

import argparse
import contextlib
import hashlib
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from llm_engine.checkpoint import CheckpointError, load_llama
from llm_engine.drafts import Draft, ModelDraft, NgramDraft, RandomDraft
from llm_engine.engine import Engine
from llm_engine.judge import Parting, partings, partings_from_plain
from llm_engine.model import Llama, LlamaConfig, damp, random_llama, shallow_copy
from llm_engine.ranks import Ranks, RanksError
from llm_engine.report import Model, Run, broken_promises
from llm_engine.runner import MODES, Limits, Runner, configuration
from llm_engine.scheduler import BlockAllocator, Request, Scheduler
from llm_engine.workload import Workload, scarce_blocks

from cgcompile.errors import AgreementError

COMPILERS = ("inductor", "aot", "eager")
DRAFTS = ("none", "random", "ngram", "model")
WARMING = 3  # requests that are served before a run
DRAFT_MODES = ("NONE", "FULL_AND_PIECEWISE")
SPECULATIVE = {
    "modes": ["FULL_AND_PIECEWISE"],
    "draft": ["none", "model"],
    "draft_modes": ["FULL_AND_PIECEWISE"],
    "draft_tokens": 4,
    "draft_layers": 2,
    "layers": 6,
    "later_layers": 0.1,
}
SIZES = {
    "layers": 2,
    "hidden": 64,
    "intermediate": 128,
    "heads": 4,
    "kv-heads": 2,
    "vocab": 128,
    "requests": 10,
    "prompt": 24,
    "tokens": 16,
    "max-reqs": 6,
    "budget": 32,
    "block-size": 4,
    "draft-tokens": 3,
    "draft-layers": 1,
    "seed": 0,
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Continuous batching of a Llama with CUDA graphs.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    parser.add_argument("--model", help="folder of a Llama as Hugging Face saves it")
    parser.add_argument("--draft-model", help="folder of the draft; left out: the first layers")
    parser.add_argument(
        "--compiler", choices=COMPILERS, help="default: inductor on CUDA, else eager"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=MODES,
        choices=MODES,
        metavar="MODE",
        help=f"default: {' '.join(MODES)}; the first has the tokens to match",
    )
    parser.add_argument(
        "--draft",
        nargs="+",
        choices=DRAFTS,
        metavar="DRAFT",
        help=f"default: {' '.join(DRAFTS)}; none on several ranks, which take no draft model",
    )
    parser.add_argument(
        "--draft-modes",
        nargs="+",
        default=DRAFT_MODES,
        choices=MODES,
        metavar="MODE",
        help=f"with drafts; default: {' '.join(DRAFT_MODES)}",
    )
    text = "drafts of a model beside plain decoding: other defaults, and a comparison at the end"
    parser.add_argument("--speculative", action="store_true", help=text)
    text = "factor of what random layers behind those of the draft add; default: %(default)s"
    parser.add_argument("--later-layers", type=float, default=1.0, help=text)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", default=dtypes[0], choices=dtypes, help="default: %(default)s")
    parser.add_argument(
        "--close-calls",
        type=float,
        help="tokens may differ where their logits are so close, in standard deviations: padding "
        "changes the last bits; default: 0, in bfloat16, where it changes more, 0.1",
    )
    parser.add_argument(
        "--blocks", type=int, default=0, help="of the cache; default: so few that it gets full"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[],
        help="capture sizes in tokens; default: a ladder up to the budget",
    )
    text = "print the table of graphs of every run"
    parser.add_argument("--coverage", action="store_true", help=text)
    for name in ("tensor-parallel", "data-parallel"):
        text = "ranks that torchrun starts are the product of the two; default: %(default)s"
        parser.add_argument(f"--{name}", type=int, default=1, help=text)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    return parser


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options()
    args = parser.parse_args(argv)
    if args.speculative:
        parser.set_defaults(**SPECULATIVE)
        args = parser.parse_args(argv)
    args.parallel = args.tensor_parallel * args.data_parallel > 1
    if args.draft is None:
        args.draft = DRAFTS[:1] if args.parallel else DRAFTS
    if args.parallel and "model" in args.draft:
        parser.error("--draft model: ranks that draft at some steps alone would not be in step")
    if args.compiler is None:
        args.compiler = "inductor" if torch.device(args.device).type == "cuda" else "eager"
    if args.close_calls is None:
        args.close_calls = 0.0 if args.dtype == "float32" else 0.1
    return args


def make_model(args: argparse.Namespace) -> Llama:
    """The checkpoint, or random weights."""
    if args.model:
        model = load_llama(args.model)
    else:
        config = LlamaConfig(
            vocab=args.vocab,
            hidden=args.hidden,
            intermediate=args.intermediate,
            layers=args.layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            head_dim=args.hidden // args.heads,
        )
        model = random_llama(config, args.seed)
        damp(model, args.draft_layers, args.later_layers)
    return model.place(args.device, getattr(torch, args.dtype))


def make_draft_model(args: argparse.Namespace, model: Llama) -> Llama:
    """Another checkpoint, or the first layers of the target."""
    if not args.draft_model:
        return shallow_copy(model, args.draft_layers)
    draft = load_llama(args.draft_model).place(args.device, getattr(torch, args.dtype))
    if draft.config.vocab != model.config.vocab:
        sizes = f"{draft.config.vocab} tokens, the target {model.config.vocab}"
        raise CheckpointError(f"the draft model has a vocabulary of {sizes}")
    return draft


class Server:
    """The models, compiled once, and the workload; each run has an engine of its own."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None = None) -> None:
        self.args, self.ranks = args, ranks
        self.most_drafts = args.draft_tokens if set(args.draft) - {"none"} else 0
        target = make_model(args)
        config = target.config
        self.workload = Workload(
            args.requests,
            args.prompt,
            args.tokens,
            config.vocab,
            every=args.tokens / (2 * args.max_reqs),  # more than can be served: a queue forms
            at_once=max(4, args.max_reqs // 2),
            seed=args.seed,
            stop_tokens=config.stop_tokens,
        )
        longest = max(each.longest for each in self.requests()) + self.most_drafts
        self.limits = Limits(
            args.max_reqs, args.budget, -(-longest // args.block_size), tuple(args.sizes)
        )
        self.whole = make_model(args) if ranks else target  # of which each rank has one
        self.whole.make_caches(self._blocks(self.most_drafts), args.block_size)
        self.target = self._runner(ranks.split(target) if ranks else target)
        self.small: tuple[Runner, Runner] | None = None  # for prompts, and for rounds of drafts
        self._reference: Run | None = None
        if "model" in args.draft:
            prompts = self._runner(make_draft_model(args, target))
            limits = replace(self.limits, num_tokens=args.max_reqs, sizes=())
            rounds = Runner(prompts.model, prompts.config, limits, compiled=prompts.compiled)
            self.small = prompts, rounds

    def requests(self) -> list[Request]:
        """Fresh requests, of this rank's replica."""
        requests = self.workload.make()
        return self.ranks.share(requests) if self.ranks else requests

    def _blocks(self, draft_tokens: int) -> int:
        args = self.args
        if args.blocks:
            return int(args.blocks)
        return scarce_blocks(self.requests(), args.max_reqs, args.block_size, draft_tokens)

    def _runner(self, model: Llama) -> Runner:
        model.make_caches(self._blocks(self.most_drafts), self.args.block_size)
        config = configuration(self.args.device, self.args.compiler)
        return Runner(model, config, self.limits, self.ranks.agreement if self.ranks else None)

    def _draft(self, name: str) -> Draft | None:
        if name == "random":
            return RandomDraft(self.target.model.config.vocab, self.args.seed)
        if name == "ngram":
            return NgramDraft()
        return ModelDraft(*self.small) if name == "model" and self.small is not None else None

    def run(self, mode: str, draft: str) -> Run:
        """Serve the workload."""
        k = 0 if draft == "none" else self.args.draft_tokens
        runners = {"target": self.target}
        self.target.start(mode, [1 + k], sampled=1 + k)
        if draft == "model" and self.small is not None:
            prompts, rounds = self.small
            runners |= {"draft model, prompts": prompts, "draft model": rounds}
            prompts.start(mode, [1])
            rounds.start(mode, [1], drafts=k)
        # Kernels that no capture ran are loaded now.
        self._engine(draft, k).serve(self.requests()[:WARMING])
        for runner in runners.values():
            runner.reset()
        engine, requests = self._engine(draft, k), self.requests()
        scheduler = engine.scheduler
        self._synchronize()
        begin = time.perf_counter()
        engine.serve(requests)
        self._synchronize()
        seconds = time.perf_counter() - begin
        run = Run(
            mode,
            draft,
            requests,
            [Model.of(title, runner) for title, runner in runners.items()],
            scheduler.pressure,
            engine.drafted,
            engine.mixed_steps,
            seconds,
            scheduler.allocator.num_blocks - 1 - scheduler.allocator.num_free,
        )
        for runner in runners.values():
            runner.stop()
        return replace(run, partings=self._partings(run))

    def _engine(self, draft: str, draft_tokens: int) -> Engine:
        args, allocator = self.args, BlockAllocator(self._blocks(draft_tokens))
        limits = (self.limits.blocks_per_req, args.max_reqs, args.budget)
        scheduler = Scheduler(allocator, args.block_size, *limits, draft_tokens=draft_tokens)
        return Engine(self.target, scheduler, self._draft(draft))

    def _partings(self, run: Run) -> tuple[Parting, ...]:
        if self.ranks:
            return partings_from_plain(run.requests, self.whole)
        self._reference = self._reference or run
        return partings(self._reference.requests, run.requests, self.whole)

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def plan(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(mode, draft) of each run; the first one has the tokens that all others must have."""
    runs = [(mode, "none") for mode in args.modes if "none" in args.draft]
    return runs + [(m, draft) for draft in args.draft for m in args.draft_modes if draft != "none"]


def serve_all(args: argparse.Namespace, ranks: Ranks | None = None) -> list[str]:
    """All runs, printed as they end; returns the broken promises of all ranks."""
    server = Server(args, ranks)
    first: list[Run] = []
    rates: dict[str, Run] = {}  # the last run with each kind of draft
    apart = 0
    broken: list[str] = []
    for mode, draft in plan(args):
        run = server.run(mode, draft)
        runs = ranks.gather(run) if ranks else [run]
        first = first or runs
        rates[draft] = run
        for rank, rank_run in enumerate(runs):
            if rank % args.tensor_parallel == 0:
                print(rank_run.text())
            apart += len(rank_run.partings)
            reference = "one process without graphs" if ranks else first[0].name
            problems = broken_promises(
                rank_run,
                reference,
                scarce=not args.blocks and ranks is None,
                close=args.close_calls,
            )
            broken += [f"rank {rank}: {text}" for text in problems] if ranks else problems
        if args.coverage:
            print_coverage(run)
    if not args.coverage:
        print_coverage(run)
    print_tokens(first)
    if args.speculative:
        print_speculation(rates, args.draft_tokens)
    print(f"tokens identical: {'no' if apart else 'yes'}")
    for problem in broken:
        print(f"BROKEN: {problem}")
    print(f"promises kept: {'no' if broken else 'yes'}")
    return broken


def print_tokens(runs: Sequence[Run]) -> None:
    """How many tokens a run made, and a digest that is equal where all tokens are."""
    output = dict(sorted((each.number, each.output) for run in runs for each in run.requests))
    count = sum(len(each) for each in output.values())
    distinct = {token for each in output.values() for token in each}
    digest = hashlib.sha256(repr(output).encode()).hexdigest()[:16]
    print(f"tokens: {count} in the first run, {len(distinct)} different ones, digest {digest}")


def print_speculation(runs: Mapping[str, Run], draft_tokens: int) -> None:
    """What each kind of draft gains over none."""
    plain = runs["none"].tokens_a_second
    for draft, run in runs.items():
        if draft != "none":
            print(
                f"{draft} draft: {run.accepted_a_round:.2f} of {draft_tokens} drafts accepted a "
                f"round, {run.tokens_a_second:.1f} tokens/s; without drafts {plain:.1f}: "
                f"{run.tokens_a_second / plain:.2f} x"
            )


def print_coverage(run: Run) -> None:
    for model in run.models:
        print(f"\n{run.name}, {model.title}:\n{model.coverage}\n")


def serve_on_ranks(args: argparse.Namespace) -> list[str]:
    """All runs, on this and the other ranks; the first one prints."""
    ranks = Ranks(args.tensor_parallel, args.data_parallel, args.device)
    args.device = str(ranks.device)
    with contextlib.redirect_stdout(sys.stdout if ranks.rank == 0 else io.StringIO()):
        broken = serve_all(args, ranks)
    ranks.close()
    return broken


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_float32_matmul_precision("highest")  # no TF32: it could turn a close call
    try:
        broken = serve_on_ranks(args) if args.parallel else serve_all(args)
    except (CheckpointError, RanksError) as error:
        print(error, file=sys.stderr)
        return 2
    except AgreementError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # the usual exit could wait for the ranks that have ended
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
