"""Measurements in worker processes: what crashes or takes too long is a row, not the end."""

import json
import os
import queue
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from model_zoo.measure import Row

Task = tuple[str, str]  # name and way
_ENVIRONMENT = {  # of a worker, of which there are as many as cores
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class OutOfTime(Exception):
    """The run is over."""


class Worker:
    """One process, started again where it died or was ended.

    Args:
        command: starts it. It reads a JSON list, name and way, from each line of its standard input
            and answers with one line, a row as JSON.
        limit: seconds for a row; the start of the process counts.
        until: a time of ``time.perf_counter`` at which the row that is measured is given up.
        environment: what is set for it alone.
    """

    def __init__(
        self,
        command: list[str],
        limit: float,
        until: float = float("inf"),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._command, self._limit, self._until = command, limit, until
        self._environment = {**os.environ, **_ENVIRONMENT, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115

    def row(self, task: Task) -> dict[str, Any]:
        """Measure; a crash and a time-out are rows as well.

        Raises:
            OutOfTime: it is not measured.
        """
        begun = time.perf_counter()
        if begun >= self._until:
            raise OutOfTime
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, min(begun + self._limit, self._until))
        except BrokenPipeError:
            line = b""
        if line:
            row: dict[str, Any] = json.loads(line)
            if row["outcome"] == "error":
                self.end()  # a device that failed once fails again in the same process
            return row
        self.end()
        if line is None and time.perf_counter() >= self._until:
            raise OutOfTime
        outcome = "time-out" if line is None else "crash"
        code = process.returncode
        detail = f"after {self._limit:.0f} s" if line is None else f"exit {code}: {self._last()}"
        seconds = time.perf_counter() - begun
        return Row(*task, outcome=outcome, detail=detail, seconds=seconds).to_json()

    def _start(self) -> subprocess.Popen[bytes]:
        self._said.seek(0)
        self._said.truncate()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=self._said,
            bufsize=0,
            env=self._environment,
        )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """One line; nothing at the end of the process; None at the deadline."""
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return b""
            line += read
        return line

    def _last(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def end(self) -> None:
        """End the process; the next row starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            self._process = None


def measured(
    tasks: Iterable[Task],
    workers: int,
    command: list[str],
    limit: float,
    seconds: float = float("inf"),
    places: Sequence[Mapping[str, str]] = (MappingProxyType({}),),
) -> Iterator[dict[str, Any]]:
    """Rows of all tasks as they come, from several workers at once.

    Args:
        tasks: what to measure, the first ones first.
        workers: how many processes.
        command: of a :class:`Worker`.
        limit: seconds for a row.
        seconds: after which the run ends, and rows that are not there yet do not come.
        places: environments, one for each GPU; the workers take turns.
    """
    until = time.perf_counter() + seconds
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    count = 0
    for task in tasks:
        waiting.put(task)
        count += 1
    done: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def work(index: int) -> None:
        worker = Worker(command, limit, until, places[index % len(places)])
        try:
            while True:
                done.put(worker.row(waiting.get_nowait()))
        except (queue.Empty, OutOfTime):
            pass
        finally:
            worker.end()
            done.put(None)

    threads = [
        threading.Thread(target=work, args=(index,), daemon=True)
        for index in range(min(workers, count))
    ]
    for thread in threads:
        thread.start()
    at_work = len(threads)
    while at_work:
        row = done.get()
        if row is None:
            at_work -= 1
        else:
            yield row
    for thread in threads:
        thread.join()


def serve(row: Callable[[Task], dict[str, Any]]) -> None:
    """What a worker does: answer tasks until its input ends. Prints of models go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open(0, closefd=False) as asked:
        for line in asked:
            name, way = json.loads(line)
            answers.write(json.dumps(row((name, way))) + "\n")
            answers.flush()
