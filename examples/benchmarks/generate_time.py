"""Time of decoders of ``transformers``, unmodified: a decode step, a token, the first text.

Run it on a machine with a CUDA device::

    pip install transformers
    python examples/benchmarks/generate_time.py --json generate.json
    python examples/benchmarks/generate_time.py --models llama-8b --rows 1 --parts step --timeline

Decoders with the sizes of known ones and random weights in bfloat16, with a static cache. Parts:

* ``step``: the GPU's time of one decode step, medians of bursts that were enqueued before they ran;
  its kernels by kind, from a profile; and the floor: the bytes of the weights and of the cache in
  use, at the bandwidth that a sum and a copy reach in the same run.
* ``generate``: milliseconds a token of ``model.generate`` with a kept cache, greedy, between 16 and
  144 new tokens: medians of pairs. On CUDA also gigabytes that torch has reserved: the most, in the
  first texts and in later ones, and what is left between two texts.
* ``first``: seconds of the first ``generate`` of 16 tokens in a fresh process that has built the
  model: cold, with empty caches on disk, and warm, with those that the cold one has left.

A way is ``eager``, ``torch.compile``, one of its modes, or ``cgcompile``, with settings behind it:
``--ways "cgcompile kernels=-small_batch"``. A setting that this cgcompile lacks is left out.
``custom_generate`` is :class:`cgcompile.integrations.transformers.Generate`, for parts ``generate``
and ``first``; it takes settings as well.

Each way runs in processes of its own, with empty caches. Those of ``step`` and ``generate`` compile
side by side, as many as the device has memory for, and are measured one by one. Exits with 1
where a way is wrong: logits of a step that are farther from those of float32 weights than
eager's, times ``--limit``; or a token of ``generate`` whose eager logit is far below the largest.
"""

import argparse
import copy
import datetime
import fcntl
import itertools
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rivals.decoders import Cell, Row, about_text, joined, label, number, tables
from rivals.kernels import Kernel, by_kind, profiled, rules, timeline_table
from rivals.report import text_table
from rivals.timing import Call, Probe, burst_seconds, gpu_seconds, wait, wall_seconds

import cgcompile
from cgcompile.integrations.transformers import Generate

PARTS = ("step", "generate", "first")
MODES = {"torch.compile": "default"} | {mode: mode for mode in ("reduce-overhead", "max-autotune")}
WAYS = (
    *("eager", "torch.compile", "reduce-overhead", "cgcompile"),
    *("cgcompile kernels=-small_batch", "cgcompile kernels=-decode_attention"),
    "custom_generate",
)
OWN = ("cgcompile", "custom_generate")
SHORT, LONG = 16, 144  # new tokens
PAIRED = 20.0  # seconds after which no other pair of texts starts
BURSTS = (10, 3, 1)  # steps that are enqueued at once, the most that the device takes
REGRET = 0.5  # of the standard deviation of the logits: how far below the largest a token may be
PRINTED = (
    *("gpu_ms", "token_ms", "token_ms_of_pairs", "quiet", "start", "first_s"),
    *("first_gb", "later_gb", "kept_gb"),
)
UNUSED = 30.0  # keys and values of positions beyond those in use: one that is read shows

Sizes = dict[str, Any]
MODELS: dict[str, tuple[str, Sizes]] = {
    "llama-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
    ),
    "qwen-0.6b": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
}
TINY: Sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


# ---------------------------------------------------------------- models


def configuration(args: argparse.Namespace, name: str) -> Any:
    import transformers

    kind, sizes = MODELS[name]
    ends: Sizes = {"eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0}
    sizes = {**sizes, **(TINY if args.tiny else {}), **ends, "max_position_embeddings": 8192}
    return getattr(transformers, kind)(**sizes)


def made_on(device: str, config: Any) -> Any:
    """Return a model with the same random weights in each process, made on the device."""
    import transformers

    make: Any = transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    if device == "cuda":
        torch.cuda.empty_cache()  # a head that was tied leaves a block that others would split
    return model


def weight_bytes(config: Any) -> tuple[int, int]:
    """Return the bytes of all weights, and of those that a step reads: all but an embedding."""
    model = made_on("meta", config)
    every = sum(weight.nbytes for weight in model.parameters())  # tied ones once
    tied = config.tie_word_embeddings
    return every, every if tied else every - model.get_input_embeddings().weight.nbytes


def cache_bytes(config: Any, rows: int, positions: int) -> int:
    width: int = config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return 2 * 2 * width * rows * positions


def bandwidth(device: str, gigabytes: float = 2.0) -> float:
    """Return the bytes a second that the better of a sum and a copy reaches."""
    if device != "cuda":
        return math.nan
    x = torch.ones(int(gigabytes * 2**28), device=device)
    y = torch.empty_like(x)
    runs: list[tuple[Call, int]] = [(x.sum, x.nbytes), (partial(y.copy_, x), 2 * x.nbytes)]
    rates = []
    for call, moved in runs:
        call()
        times = [gpu_seconds(call, 1e-3) for _ in range(10)]
        rates += [moved / seconds for seconds in times if seconds]
    del x, y, runs, call
    torch.cuda.empty_cache()  # the processes need the memory
    return max(rates)


class Step:
    """One decode step of a model over a cache that is partly in use."""

    def __init__(self, model: Any, cell: Cell, device: str) -> None:
        from transformers import StaticCache

        config = model.config
        shape = (cell.rows, config.num_key_value_heads, config.head_dim)
        make: Any = StaticCache
        self.cache = make(config=config, max_cache_len=cell.cache)
        self.cache.early_initialization(*shape, torch.bfloat16, torch.device(device))
        generator = torch.Generator(device).manual_seed(2)
        size, vocabulary = (cell.rows, 1), config.vocab_size
        self.ids = torch.randint(vocabulary, size, device=device, generator=generator)
        self.use(cell.used)

    def use(self, used: int) -> None:
        """Fill the cache where it is, with a number of positions in use."""
        self.used, generator = used, torch.Generator(self.ids.device).manual_seed(1)
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor.normal_(generator=generator)
                tensor[:, :, used:] = UNUSED
        self.rewind()

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.used)

    def __call__(self, forward: Callable[..., Any]) -> torch.Tensor:
        logits: torch.Tensor = forward(input_ids=self.ids, past_key_values=self.cache).logits
        return logits

    def in_float32(self, model: Any) -> torch.Tensor:
        """Return logits of float32 weights and a float32 cache."""
        weights: dict[int, Any] = {
            id(weight): torch.nn.Parameter(weight.float(), requires_grad=False)
            for weight in model.parameters()
        }
        exact = copy.deepcopy(model, weights)  # with these in place of its own
        kept, self.cache = self.cache, copy.deepcopy(self.cache)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
        logits = self(exact.forward)
        self.cache = kept
        return logits


# ---------------------------------------------------------------- ways


def is_known(way: str) -> bool:
    """Return whether this cgcompile has all settings of a way."""
    return way in ("eager", *MODES) or settings_of(way).keys() <= set(
        cgcompile.CompilationConfig.names()
    )


def settings_of(way: str) -> dict[str, str]:
    first, *pairs = way.split()
    if first not in OWN or not all("=" in pair for pair in pairs):
        raise ValueError(f"unknown way {way!r}: eager, {', '.join(MODES)} or cgcompile NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def backend_of(args: argparse.Namespace, way: str) -> cgcompile.Backend | None:
    if not way.startswith(OWN):
        return None
    device = "auto" if args.device == "cuda" else "host"
    more: dict[str, Any] = {"compiler": args.compiler, **settings_of(way)}
    return cgcompile.Backend(capture_device=device, **more)


def compiled(way: str, backend: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward in one of the ways; all sizes are static, as in a process of one shape."""
    if way == "eager":
        return forward
    if backend is not None:
        return torch.compile(forward, backend=backend, dynamic=False)
    return torch.compile(forward, mode=MODES[way], dynamic=False)


# ---------------------------------------------------------------- a step


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the RMS error relative to the RMS of the exact logits."""
    difference = logits.double() - exact.double()
    return float(difference.pow(2).mean().sqrt() / exact.double().pow(2).mean().sqrt())


class Turn:
    """Files that processes lock: to measure alone, or to need much memory alone."""

    def __init__(self, folder: str) -> None:
        names = ("compile", "measure", "memory")
        self.files = {name: (Path(folder) / name).open("w") for name in names}

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        fcntl.flock(self.files[name], fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.files[name], fcntl.LOCK_UN)

    def compiling(self) -> None:
        """Let no other process measure before this one does."""
        fcntl.flock(self.files["compile"], fcntl.LOCK_SH)

    @contextmanager
    def measuring(self, until: float) -> Iterator[bool]:
        """Measure alone; from a time on beside others that compile: whether none does."""
        file = self.files["compile"]
        fcntl.flock(file, fcntl.LOCK_UN)
        with self.alone("measure"):
            quiet = False
            while not quiet:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    quiet = True
                except BlockingIOError:
                    if time.monotonic() > until:
                        break
                    time.sleep(0.1)
            try:
                yield quiet
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def say(args: argparse.Namespace, what: str) -> None:
    """Tell how far the process of a job has come."""
    job = " ".join([*args.parts, *args.models, *args.ways, *map(str, args.rows)])
    print(f"[{job}] {time.monotonic() - args.began:5.1f} s: {what}", file=sys.stderr, flush=True)


def step_rows(args: argparse.Namespace, model_name: str, way: str, turn: Turn) -> list[Row]:
    """Compile all cells of one way, then measure them."""
    torch._dynamo.config.recompile_limit = 64  # of one code object: each cell is a compilation
    probe = Probe.make() if args.device == "cuda" else None
    model = made_on(args.device, configuration(args, model_name))
    steps: dict[tuple[int, int], Step] = {}  # compiled once, for all cells that differ in use only
    for cell in cells(args, "step"):
        if cell[:2] not in steps:
            steps[cell[:2]] = Step(model, cell, args.device)
    wait(args.device)
    say(args, "made the model")
    exact = {}
    with turn.alone("memory"), torch.no_grad():
        for cell in cells(args, "step"):
            steps[cell[:2]].use(cell.used)
            exact[cell] = steps[cell[:2]].in_float32(model)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    say(args, "ran with float32 weights")
    turn.compiling()
    with torch.inference_mode():
        backends = {shape: backend_of(args, way) for shape in steps}
        calls = {
            shape: partial(step, compiled(way, backends[shape], model.forward))
            for shape, step in steps.items()
        }
        ready: list[Row] = []
        for cell, logits in exact.items():
            step, call = steps[cell[:2]], calls[cell[:2]]
            step.use(cell.used)
            row: Row = {"model": model_name, "cell": cell, "way": way, "part": "step"}
            row["eager_error"] = relative_error(step(model.forward), logits)
            for _ in range(4):
                step.rewind()
                result = call()
            row["error"] = relative_error(result, logits)
            ready.append(row)
            say(args, f"compiled {cell}")
        with turn.measuring(args.patient_until) as quiet:
            for row in ready:
                cell = row["cell"]
                steps[cell[:2]].use(cell.used)
                row["quiet"] = quiet
                if probe is not None:
                    row["probe_us"] = 1e6 * probe.seconds()
                row |= step_times(args, steps[cell[:2]], calls[cell[:2]], backends[cell[:2]])
                say(args, f"measured {cell}")
    return ready


def step_times(args: argparse.Namespace, step: Step, call: Call, backend: Any) -> Row:
    """Return the GPU's time of a step, its kernels, and whether all calls were replays."""
    before = backend and backend.counters

    def burst(count: int) -> None:
        for _ in range(count):
            call()

    step.rewind()
    row: Row = {"host_ms": 1e3 * burst_seconds(call, args.device, 3)}
    if args.device == "cuda":
        for count in BURSTS:
            run, samples = partial(burst, count), []
            for _ in range(args.rounds):
                step.rewind()
                samples.append(gpu_seconds(run, row["host_ms"] / 1e3 * count))
            times = [seconds / count for seconds in samples if seconds is not None]
            if len(times) > args.rounds // 2:
                row |= {"gpu_ms": 1e3 * statistics.median(times), "burst": count}
                break
        step.rewind()
        count = min(3, row.get("burst", 1))
        try:
            kernels = profiled(partial(burst, count), row["host_ms"] / 1e3 * count)
        except Exception as error:  # without a profile the time of the step is still right
            say(args, f"no profile: {error}")
        else:
            row |= {"kernels": len(kernels) / count, "kinds": by_kind(kernels, count)}
            row |= {"profiled_steps": count, "timeline": kernels}
    if backend is not None:
        after = backend.counters
        row["replayed"] = (after.replays - before.replays) / (after.calls - before.calls)
    return row


# ---------------------------------------------------------------- generate


def text_of(
    args: argparse.Namespace, model: Any, way: str, cell: Cell
) -> tuple[Callable[[int], torch.Tensor], Any]:
    """Return a function that generates a number of tokens, and what counts its replays."""
    from transformers import CompileConfig, StaticCache

    handle = backend_of(args, way)
    prompt = torch.randint(model.config.vocab_size, (cell.rows, cell.used), device=args.device)
    if way.startswith("custom_generate"):
        own = Generate(backend=handle, max_cache_len=cell.cache)

        def own_text(tokens: int) -> torch.Tensor:
            result: torch.Tensor = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                custom_generate=own,
            )
            return result

        return own_text, own  # whose counters count texts

    def backend(graph: Any, inputs: Any) -> Any:  # generate() copies its configuration deeply
        return handle(graph, inputs)  # type: ignore[misc]

    how: dict[str, Any] = {"disable_compile": True}
    if way != "eager":
        chosen: Any = {"mode": MODES.get(way)} if handle is None else {"backend": backend}
        settings = CompileConfig(**{"mode": None, **chosen})
        settings._compile_all_devices = True if args.device == "cpu" else None  # type: ignore[assignment]
        how = {"compile_config": settings}
    make: Any = StaticCache
    cache = make(config=model.config, max_cache_len=cell.cache)
    how |= {"attention_mask": torch.ones_like(prompt), "past_key_values": cache}

    def text(tokens: int) -> torch.Tensor:
        cache.reset()
        result: torch.Tensor = model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **how
        )
        return result

    return text, handle


def regret_of(model: Any, text: torch.Tensor, used: int) -> float:
    """Return how far the logits of the chosen tokens are below the largest, at most.

    Logits are those of one eager forward over the text, in units of their standard deviation.
    """
    with torch.inference_mode():
        logits = model(input_ids=text[:, :-1], logits_to_keep=text.shape[1] - used).logits
    logits = logits[:, -(text.shape[1] - used) :].float()
    chosen = logits.gather(-1, text[:, used:, None]).squeeze(-1)
    return float((logits.amax(-1) - chosen).max() / logits.std())


def token_times(
    args: argparse.Namespace, text: Callable[[int], torch.Tensor], short: int, long: int
) -> Row:
    """Return milliseconds a token, from pairs of a long and a short text, one after the other.

    Both have the prompt, whose time varies with that of the host: the median of the pairs.
    """
    times: list[float] = []
    until = time.monotonic() + PAIRED
    while len(times) < 3 or (len(times) < args.rounds and time.monotonic() < until):
        seconds = [wall_seconds(partial(text, tokens), args.device) for tokens in (long, short)]
        times.append(1e3 * (seconds[0] - seconds[1]) / (long - short))
    return {"token_ms": statistics.median(times), "token_ms_of_pairs": sorted(times)}


def memory_of_first(args: argparse.Namespace) -> Row:
    """Return the most memory so far, and count from here."""
    if args.device != "cuda":
        return {}
    most = torch.cuda.max_memory_reserved() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"first_gb": most}


def memory_of_later(args: argparse.Namespace) -> Row:
    """Return the most memory since the first texts, and what stays when unused blocks are free."""
    if args.device != "cuda":
        return {}
    most = torch.cuda.max_memory_reserved() / 1e9
    torch.cuda.empty_cache()
    return {"later_gb": most, "kept_gb": torch.cuda.memory_reserved() / 1e9}


def generate_rows(args: argparse.Namespace, model_name: str, way: str, turn: Turn) -> list[Row]:
    """Measure the one cell of this process: the first text, or a token."""
    (part,) = args.parts
    (cell,) = cells(args, part)
    short, long = (4, 12) if args.tiny else (SHORT, LONG)
    turn.compiling()
    model = made_on(args.device, configuration(args, model_name))
    text, backend = text_of(args, model, way, cell)
    wait(args.device)
    say(args, "made the model")
    row: Row = {"model": model_name, "cell": cell, "way": way, "part": part}
    row["first_s"] = wall_seconds(partial(text, short), args.device)
    say(args, "generated the first text")
    if part == "generate":
        text(long)
        wait(args.device)
        row |= memory_of_first(args)
        with turn.measuring(args.patient_until) as row["quiet"]:
            row |= token_times(args, text, short, long)
        row |= memory_of_later(args)
    row["regret"] = regret_of(model, text(long if part == "generate" else short), cell.used)
    if backend is not None and (part == "generate" or backend.counters.replays):
        row["replayed"] = backend.counters.replays / max(backend.counters.calls, 1)
    return [row]


# ---------------------------------------------------------------- processes


def cells(args: argparse.Namespace, part: str) -> list[Cell]:
    """Return the cells in which the steps of a burst, or a text, fit behind those in use."""
    most = max(BURSTS) if part == "step" else 12 if args.tiny else LONG
    return [
        Cell(rows, cache, used)
        for rows in args.rows
        for cache in args.cache
        for used in args.used
        if used + most <= cache
    ]


class Memory:
    """Lets processes start while their bytes fit on the device."""

    def __init__(self, total: float) -> None:
        self.total, self.free, self.changed = total, total, threading.Condition()

    @contextmanager
    def taken(self, nbytes: float) -> Iterator[None]:
        nbytes = min(nbytes, self.total)  # one that needs more than there is runs alone
        with self.changed:
            self.changed.wait_for(lambda: self.free >= nbytes)
            self.free -= nbytes
        try:
            yield
        finally:
            with self.changed:
                self.free += nbytes
                self.changed.notify_all()


class Job(NamedTuple):
    """One process."""

    part: str
    model: str
    way: str
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        return f"{self.part} {self.model} {self.way} rows={self.cells[0].rows}"


def jobs_of(args: argparse.Namespace) -> list[Job]:
    jobs = []
    for part in args.parts:
        for model in args.models:
            for way in args.ways:
                if part == "step" and way.startswith("custom_generate"):
                    continue  # its step is that of cgcompile
                key = attrgetter("rows") if part == "step" else None
                groups = itertools.groupby(cells(args, part), key)
                jobs += [Job(part, model, way, tuple(group)) for _, group in groups]
    return jobs


def run_job(args: argparse.Namespace, job: Job, folder: Path, turn: str, threads: int) -> list[Row]:
    """Run one job in a process whose caches on disk are in a folder.

    Raises:
        RuntimeError: the process failed, or the time is over.
    """
    environment = {
        **os.environ,
        "CGCOMPILE_CACHE_DIR": str(folder / "cgcompile"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HUB_OFFLINE": "1",
    }
    if threads:
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    (folder / "cgcompile").mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--device", args.device, "--compiler", args.compiler]
    left = args.until - time.monotonic()
    command += ["--rounds", str(args.rounds), "--turn", turn, "--seconds", str(left)]
    command += ["--tiny"] if args.tiny else []
    command += ["--parts", job.part, "--models", job.model, "--ways", job.way]
    for column, name in enumerate(Cell._fields):
        numbers = dict.fromkeys(str(cell[column]) for cell in job.cells)
        command += [f"--{name}", *numbers]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=left
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError("the time is over") from None
    if done.returncode:
        raise RuntimeError(f"its process ended with code {done.returncode}: see above")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def rows_of_job(args: argparse.Namespace) -> list[Row]:
    """Measure the one job of this process."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    say(args, "imported torch")
    rows_of = step_rows if args.parts == ["step"] else generate_rows
    with Turn(args.turn) as turn:
        return rows_of(args, args.models[0], args.ways[0], turn)


def all_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows as they come; a job that failed gives one with its ``failure``."""
    jobs = [job for job in jobs_of(args) if not re.search(args.skip, job.label)]
    cores = os.cpu_count() or 1
    memory = Memory(math.inf)
    needs = {name: 0.0 for name in args.models}
    if args.device == "cuda":
        for name in args.models:
            config = configuration(args, name)
            most = max((cell.rows * cell.cache for job in jobs for cell in job.cells), default=0)
            most *= max((len({cell[:2] for cell in job.cells}) for job in jobs), default=0)
            needs[name] = 1.02 * (weight_bytes(config)[0] + cache_bytes(config, 1, most)) + 0.8e9
        # One process at a time holds float32 weights as well.
        memory = Memory(0.97 * torch.cuda.mem_get_info()[0] - 1.9 * max(needs.values()))

    def tried(job: Job, folder: Path, turn: str, threads: int, **more: Any) -> list[Row]:
        try:
            with memory.taken(needs[job.model] if threads else 0.0):
                return [row | more for row in run_job(args, job, folder, turn, threads)]
        except RuntimeError as error:
            row = {"part": job.part, "model": job.model, "way": job.way, "cell": job.cells[0]}
            return [row | more | {"failure": str(error)}]

    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(args.at_once or 64) as pool:
        for part in args.parts:
            chosen = [job for job in jobs if job.part == part]
            folders = [Path(top) / f"{part}{number}" for number in range(len(chosen))]
            if part == "first":
                for start in ("cold", "warm"):  # a time limit costs warm ones first
                    for job, folder in zip(chosen, folders, strict=True):
                        yield from tried(job, folder, top, 0, start=start)
                continue
            threads = max(1, cores // max(len(chosen), 1))
            runs = [
                pool.submit(tried, job, folder, top, threads)
                for job, folder in zip(chosen, folders, strict=True)
            ]
            for run in as_completed(runs):
                yield from run.result()


# ---------------------------------------------------------------- results


def trouble(args: argparse.Namespace, row: Row) -> str:
    """Return what is wrong with a row; empty if it is right."""
    if "failure" in row:
        return str(row["failure"])
    if "error" in row and not row["error"] <= args.limit * row["eager_error"]:
        return f"RMS error {row['error']:.2e}, eager {row['eager_error']:.2e}"
    if "regret" in row and not row["regret"] <= REGRET:
        return f"a token is {row['regret']:.2f} standard deviations below the largest logit"
    if row.get("replayed", 1.0) < (1.0 if row["part"] == "step" else 0.2):
        return f"only {row['replayed']:.0%} of the calls were replays"
    return ""


def about(args: argparse.Namespace) -> Row:
    """Return the machine, the versions and what is measured."""
    import transformers

    on_cuda = args.device == "cuda"
    return {
        "card": torch.cuda.get_device_name() if on_cuda else "CPU",
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "cgcompile": cgcompile.__version__,
        "bandwidth": bandwidth(args.device),
        "models": list(args.models),
        "ways": list(args.ways),
        "date": datetime.date.today().isoformat(),
        "rows": [],
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoders of transformers in several ways.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="inductor", help="of cgcompile")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cache", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--used", type=int, nargs="+", default=[200, 900])
    parser.add_argument("--rounds", type=int, default=9, help="bursts of a step")
    parser.add_argument("--limit", type=float, default=1.5, help="of errors, times eager's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--at-once", type=int, default=0, help="processes that compile at once")
    parser.add_argument(
        "--skip", default="^$", help="of jobs 'PART MODEL WAY rows=N': an expression"
    )
    parser.add_argument("--timeline", action="store_true", help="print the kernels of each step")
    parser.add_argument("--json", type=Path, help="write all figures to a file, or add them to it")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the program")
    parser.add_argument("--turn", help=argparse.SUPPRESS)  # a folder: this is one job's process
    args = parser.parse_args(argv)
    args.began = time.monotonic()
    args.until = args.began + args.seconds
    args.patient_until = args.began + 0.6 * args.seconds  # for others that compile
    return args


def measure(args: argparse.Namespace, result: Row) -> bool:
    """Add all rows to the result, and return whether all are right."""
    good = True
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    configs = {name: configuration(args, name) for name in args.models}
    weights = {name: weight_bytes(config)[1] for name, config in configs.items()}
    joined(before, result)  # an error now, not after an hour
    for row in all_rows(args):
        cell = Cell(*row["cell"])
        needed = weights[row["model"]] + cache_bytes(configs[row["model"]], cell.rows, cell.used)
        row["floor_ms"] = 1e3 * needed / result["bandwidth"]
        result["rows"].append(row)
        figures = {name: row[name] for name in PRINTED if name in row}
        print(f"{row['part']}, {label(row)}, {row['way']}: {figures}", flush=True)
        if wrong := trouble(args, row):
            good = False
            print(f"BROKEN: {row['part']}, {label(row)}, {row['way']}: {wrong}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(joined(before, result)))
        if args.timeline and row.get("timeline"):
            print(f"{label(row)}, {row['way']}: {number(row.get('gpu_ms'))} ms")
            kernels = [Kernel(*kernel) for kernel in row["timeline"]]
            print(text_table(timeline_table(kernels, row["profiled_steps"])), flush=True)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.turn:
        print(json.dumps(rows_of_job(args)))
        return 0
    for way in [way for way in args.ways if not is_known(way)]:
        print(f"left out, as this cgcompile lacks a setting of it: {way}")
    args.ways = [way for way in args.ways if is_known(way)]
    result = about(args)
    print(about_text(result), flush=True)
    if args.device == "cuda":
        print(rules())
    good = measure(args, result)
    for table in tables(result):
        print(text_table(table))
    print(f"all right: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
