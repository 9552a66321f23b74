"""Runs the parts in separate processes and writes `gpu.json`, which is complete at any moment.

A failing case is recorded, and the next one runs. A case that crashes its process or exceeds its
time costs only that process. Cases already on record, of the same sources and GPU, are skipped.
"""

import gc
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import sparsering as sr
from sparsering.ground.files import replace_file

from ..measure import environment
from . import bars, device, parts, tuned

Record = dict[str, Any]

LONGEST_CASE = device.sized(120.0, 300.0)  # seconds after which a case counts as hanging
_START = 120.0  # seconds that a process may take to start
# modules that affect every figure
_SHARED = ("__init__", "device", "timing", "peers", "block_sparse", "parts")


def work(connection: Connection, folder: str) -> None:
    """Worker process: sends its environment, then runs the cases it receives, one by one."""
    os.environ[tuned.FOLDER] = str(Path(folder) / "tuned")
    if device.GPU:  # an empty cache: earlier tuning on this machine must not replace defaults
        os.environ["SPARSERING_CACHE"] = str(Path(folder) / "plain")
    connection.send(("ready", {**environment(), "gpu_state": device.state()}))
    while (request := _received(connection)) is not None:
        name, case, threads = request
        torch.set_num_threads(threads)
        try:
            for row in parts.PARTS[name].cases[case]():
                connection.send(("row", row))
            device.synchronize()
            connection.send(("done", device.state() if parts.PARTS[name].timed else None))
        except BrokenPipeError:  # the parent process has gone
            return
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error}"[:600]
            message += f" ({Path(where.filename).name}:{where.lineno})"
            error.__traceback__ = None  # its frames keep tensors alive
            connection.send(("failed" if device.is_alive() else "broken", message))
        _forget()


def _received(connection: Connection) -> tuple[str, str, int] | None:
    try:
        request: tuple[str, str, int] = connection.recv()
    except EOFError:
        return None
    return request


def _forget() -> None:
    """Frees the caches and memory that a case leaves behind."""
    sr.layout_cache.clear()
    gc.collect()
    if device.GPU:
        torch.cuda.empty_cache()


class Worker:
    """Handle of a process that runs cases; it reports when it is ready."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, str(folder)))
        self._process.start()
        theirs.close()
        self.case: tuple[str, str] | None = None
        self.ready: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.until = time.perf_counter() + _START
        self.began = 0.0

    def begin(self, part: str, case: str, seconds: float, threads: int) -> None:
        """Sends a case, with its time limit and its number of CPU threads."""
        self.case, self.rows = (part, case), []
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.connection.send((part, case, threads))

    def end(self) -> str:
        """Ends the process; returns whether it had already died, and its exit code, as text."""
        self._process.join(0.5)
        code = self._process.exitcode
        self._process.kill()
        self._process.join(5)  # a limit, as a hanging GPU keeps even killed processes
        self.connection.close()
        return f"its process died (exit code {code})" if code is not None else "it was ended"


class Session:
    """One call of the benchmark, with its record."""

    def __init__(self, out: Path, record: Record | None, commit: str, keep: bool) -> None:
        self.out, self.path = out, out / "gpu.json"
        self._earlier, self._commit, self._keep = record, commit, keep
        self.record: Record = {"name": "gpu", "environment": {}, "runs": [], "parts": {}}
        self._began = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the session began."""
        return time.perf_counter() - self._began

    def starts_on(self, place: dict[str, Any]) -> str:
        """Takes over the cases of an earlier record of this GPU; returns a description."""
        place = {**place, "sources": sources()}
        if not place["commit"]:
            place["commit"], place["uncommitted_changes"] = self._commit or None, None
        earlier, summary = self._earlier or {}, "a new record"
        theirs = earlier.get("environment", {}).get("gpu")
        if earlier and theirs != place["gpu"]:
            earlier, summary = {}, f"a new record: the one that was there is of {theirs}"
        for name, part in earlier.get("parts", {}).items():
            if name not in parts.PARTS:
                continue
            cases = {
                case: state for case, state in part["cases"].items()
                if case in parts.PARTS[name].cases
                and (self._keep or state.get("sources") == sources(parts.PARTS[name].module))
            }  # fmt: skip
            if cases:
                rows = [row for row in part["rows"] if row["setting"] in cases]
                self.record["parts"][name] = {"about": part["about"], "cases": cases, "rows": rows}
        if earlier:
            number = sum(len(part["cases"]) for part in self.record["parts"].values())
            summary = f"{number} cases are on record"
        self.record["runs"] = [*earlier.get("runs", []), place]
        self.record["environment"] = place
        self.write()
        return summary

    def state(self, part: str, case: str) -> dict[str, Any] | None:
        """State of a case on record; None if it never began."""
        state: dict[str, Any] | None = self.record["parts"].get(part, {}).get("cases", {}).get(case)
        return state

    def adds(self, part: str, case: str, row: dict[str, Any] | None, **state: Any) -> None:
        """Adds a row of a case to the record, and sets the state of the case."""
        own = self.record["parts"].setdefault(
            part, {"about": parts.PARTS[part].about, "cases": {}, "rows": []}
        )
        before = own["cases"].get(case)
        if row is None and "left" in state and before is not None and "left" not in before:
            return  # an earlier result of the case stays on record
        if state.pop("first", False):
            own["rows"] = [x for x in own["rows"] if x["setting"] != case]
        if row is not None:
            own["rows"].append({"setting": case, **row})
        run = len(self.record["runs"]) - 1
        own["cases"][case] = {"run": run, "sources": sources(parts.PARTS[part].module), **state}

    def write(self) -> None:
        """Writes the record, with the current bars."""
        self.record["parts"] = {
            name: self.record["parts"][name] for name in parts.PARTS if name in self.record["parts"]
        }
        self.record["bars"] = bars.bars(self.record)
        replace_file(self.path, (json.dumps(self.record, indent=1) + "\n").encode())


def run(
    session: Session, chosen: Mapping[str, Sequence[str]], budget: float, processes: int
) -> Iterator[str]:
    """Measures the missing cases, part by part; yields a line of text for each.

    `chosen` has the parts and the cases of each; without cases all of a part, and without parts
    all parts. The smoke runs before them, unless it passed in an earlier call.
    """
    pool = _Pool(session, budget, processes)
    try:
        yield pool.first()
        for again in (False, True):
            yield from pool.phase(_missing(session, {parts.SMOKE: ()}, again))
        smokes = [session.state(parts.SMOKE, case) for case in parts.PARTS[parts.SMOKE].cases]
        if any(state is None or "seconds" not in state or "failed" in state for state in smokes):
            yield "the smoke did not pass: nothing else runs"
            return
        chosen = chosen or dict.fromkeys(parts.PARTS, ())
        for again in (False, True):  # cases that failed in earlier calls run last
            for phase in _phases(list(chosen)):
                missing = _missing(session, {name: chosen[name] for name in phase}, again)
                yield from pool.phase(missing)
    finally:
        pool.end()


def _phases(names: list[str]) -> Iterator[list[str]]:
    """Groups consecutive parts that are not timed, to run together; timed parts run alone."""
    together: list[str] = []
    for name in names:
        if parts.PARTS[name].timed:
            if together:
                yield together
            together = []
            yield [name]
        else:
            together.append(name)
    if together:
        yield together


def _missing(
    session: Session, chosen: Mapping[str, Sequence[str]], again: bool
) -> list[tuple[str, str]]:
    missing = []
    for name, cases in chosen.items():
        for case in cases or parts.PARTS[name].cases:
            state = session.state(name, case)
            failed = state is not None and "failed" in state
            new = state is None or "left" in state
            current = (
                failed and state is not None and state["run"] < len(session.record["runs"]) - 1
            )
            if (new and not again) or (again and current):
                missing.append((name, case))
    return missing


class _Pool:
    """The workers of a session: one for timed parts, several for the others."""

    def __init__(self, session: Session, budget: float, processes: int) -> None:
        self._session, self._budget, self._processes = session, budget, processes
        self._workers: list[Worker] = []
        self._died = 0

    def first(self) -> str:
        """Starts the first worker, and the record with its environment; returns a description."""
        worker = Worker(self._session.out)
        self._workers.append(worker)
        if not worker.connection.poll(_START):
            raise RuntimeError(f"a process did not answer in {_START:.0f} s")
        try:
            _, place = worker.connection.recv()
        except EOFError:
            raise RuntimeError(f"a process could not start: {worker.end()}") from None
        worker.ready = place
        summary = self._session.starts_on(place)
        return f"{place['gpu'] or 'no GPU: a rehearsal'}, torch {place['torch']}: {summary}"

    def phase(self, cases: list[tuple[str, str]]) -> Iterator[str]:
        """Runs cases; their parts are either all timed or all not timed."""
        if not cases:
            return
        timed = parts.PARTS[cases[0][0]].timed
        self._resize(1 if timed else min(self._processes, len(cases)))
        began: dict[str, float] = {}
        while cases or any(worker.case for worker in self._workers):
            for worker in self._workers:
                if worker.ready and not worker.case and cases:
                    yield from self._begin(worker, cases, began)
            yield from self._listen()

    def _begin(
        self, worker: Worker, cases: list[tuple[str, str]], began: dict[str, float]
    ) -> Iterator[str]:
        """Sends a worker the next case that fits in the time; records the cases left out."""
        while cases:
            name, case = cases.pop(0)
            part, spent = parts.PARTS[name], self._session.spent
            began.setdefault(name, spent)
            share = part.seconds / len(part.cases)
            why = ""
            if spent + share > self._budget:
                why = f"{spent:.0f} s of {self._budget:.0f} were spent"
            elif spent - began[name] > part.bound:
                why = f"the {part.bound:.0f} s of this part were spent"
            if why:
                self._session.adds(name, case, None, left=why)
                self._session.write()
                yield f"{name} | {case}: left, {why}"
                continue
            seconds = min(LONGEST_CASE, self._budget + 15 - spent)
            threads = max(1, (os.cpu_count() or 1) // len(self._workers))
            try:
                worker.begin(name, case, seconds, threads)
            except OSError:  # the worker died while it was idle
                worker.case = None
                cases.insert(0, (name, case))
                yield from self._lost(worker, worker.end())
            return

    def _listen(self) -> Iterator[str]:
        """Waits for a message from a worker, or for the end of a worker's time."""
        busy = [w for w in self._workers if w.case or not w.ready]
        if not busy:
            return
        timeout = max(0.0, min(worker.until for worker in busy) - time.perf_counter())
        heard = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection in heard:
                try:
                    kind, content = worker.connection.recv()
                except (EOFError, OSError):
                    yield from self._lost(worker, worker.end())
                else:
                    yield from self._hear(worker, kind, content)
            elif time.perf_counter() >= worker.until:
                worker.end()
                limit = worker.until - worker.began
                yield from self._lost(worker, f"no end in {limit:.0f} s")

    def _hear(self, worker: Worker, kind: str, content: Any) -> Iterator[str]:
        if kind == "ready":
            worker.ready = content
            return
        assert worker.case is not None
        name, case = worker.case
        seconds = time.perf_counter() - worker.began
        if kind == "row":
            worker.rows.append(content)
            first = len(worker.rows) == 1
            self._session.adds(name, case, content, left="it was under way", first=first)
            self._session.write()
            return
        state: dict[str, Any] = {"seconds": round(seconds, 2)}
        if content is not None:
            state["gpu_state" if kind == "done" else "failed"] = content
        self._session.adds(name, case, None, **state)
        self._session.write()
        worker.case = None
        outcome = f"{len(worker.rows)} rows" if kind == "done" else f"failed, {content}"
        yield f"{name} | {case}: {outcome}, {seconds:.1f} s"
        if kind == "broken":
            worker.end()
            self._workers.remove(worker)
            self._workers.append(Worker(self._session.out))
            yield "the GPU answered that process no more: another one goes on"

    def _lost(self, worker: Worker, why: str) -> Iterator[str]:
        """Replaces a worker that died; the rows of its case stay on record."""
        self._workers.remove(worker)
        if worker.case is None:
            self._died += 1
            if self._died > 3:
                raise RuntimeError(f"processes do not start: {why}")
        else:
            name, case = worker.case
            seconds = time.perf_counter() - worker.began
            out_of_time = self._session.spent >= self._budget and why.startswith("no end")
            state = {"left": "the call was over"} if out_of_time else {"failed": why}
            self._session.adds(name, case, None, seconds=round(seconds, 2), **state)
            self._session.write()
            yield f"{name} | {case}: {next(iter(state))}, {why}, {seconds:.1f} s"
        self._workers.append(Worker(self._session.out))

    def _resize(self, number: int) -> None:
        for worker in self._workers[number:]:
            worker.end()
        del self._workers[number:]
        while len(self._workers) < number:
            self._workers.append(Worker(self._session.out))

    def end(self) -> None:
        """Ends all workers."""
        self._resize(0)


@cache
def sources(module: str = "") -> str:
    """Digest of the sources of the library, the harness and a module of parts.

    It identifies measured sources even without a commit.
    """
    root = Path(__file__).resolve().parents[2]
    files = [
        path for path in sorted((root / "sparsering").rglob("*"))
        if path.suffix in (".py", ".cpp", ".h")
    ]  # fmt: skip
    files += [root / "benchmarks" / name for name in ("measure.py", "flex.py")]
    files += [Path(__file__).with_name(f"{name}.py") for name in _SHARED]
    if module:
        files.append(Path(inspect.getfile(sys.modules[module])))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def read(path: Path) -> Record | None:
    """Reads a record; None if the file is missing or is no record of this benchmark."""
    try:
        record: Record = json.loads(path.read_bytes())
    except (OSError, json.JSONDecodeError):
        return None
    whole = isinstance(record, dict) and record.get("name") == "gpu" and "runs" in record
    return record if whole else None
