"""How everything here is measured: contestants in turn, in one process, each with its error and its memory.

A contest is a dictionary of calls that do the same job. Each is called once for its first-call time, once for its peak
memory and its error, then `repeats` times in turn with the others, so that a drift of the machine's clock touches all of
them alike. Only ratios within one contest mean anything; every line says what the machine was.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class NotRun(NamedTuple):
    """Stands for a contestant that this machine cannot run."""

    reason: str


class Recorder(NamedTuple):
    """Where JSON lines go, and how often each contestant is timed."""

    path: Path
    repeats: int
    tiny: bool

    def write(self, name: str, contestant: str, params: dict, **values) -> dict:
        line = {"name": name, "contestant": contestant, "params": params, **values, **_facts()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        print(json.dumps({"name": name, "contestant": contestant, **params, **shown}), flush=True)
        return line

    def contest(
        self,
        name: str,
        params: dict,
        contestants: dict[str, Callable[[], Any] | NotRun],
        *,
        units: float = 1.0,
        error: Callable[[Any], float] | None = None,
        extra: Callable[[Any], dict] | None = None,
    ) -> dict[str, dict]:
        """Time the contestants in turn and write a line for each; `ns_per_unit` is per call over `units`."""
        lines, running = {}, {}
        for contestant, call in contestants.items():
            if isinstance(call, NotRun):
                lines[contestant] = self.write(name, contestant, params, not_run=call.reason)
                continue
            start = time.perf_counter()
            call()
            first = time.perf_counter() - start
            before = resident()
            reset_peak()
            result = call()
            values = {"first_call_s": first, "peak_bytes": max(0, peak() - before)}
            if error is not None:
                values["error"] = float(error(result))
            if extra is not None:
                values.update(extra(result))
            running[contestant] = (call, values, [], [])
        for _ in range(self.repeats):
            for call, _, walls, cpus in running.values():
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                walls.append(time.perf_counter() - wall)
                cpus.append(time.process_time() - cpu)
        for contestant, (_, values, walls, cpus) in running.items():
            lines[contestant] = self.write(
                name,
                contestant,
                params,
                **values,
                min_s=min(walls),
                median_s=statistics.median(walls),
                median_cpu_s=statistics.median(cpus),
                ns_per_unit=1e9 * statistics.median(walls) / units,
            )
        return lines

    def single(self, name: str, params: dict, contestant: str, call: Callable[[], Any], units: float, **values) -> dict:
        """Time one call, for jobs too long to repeat: time and peak memory from the same call."""
        before, start = resident(), time.perf_counter()
        reset_peak()
        call()
        wall = time.perf_counter() - start
        measured = {"peak_bytes": max(0, peak() - before), "median_s": wall, "ns_per_unit": 1e9 * wall / units}
        return self.write(name, contestant, params, **measured, **values)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reset_peak() -> None:
    """Start a new high-water mark of the resident memory, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """High-water mark of the resident memory in bytes."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)


@cache
def _facts() -> dict:
    from attnflow.facts import facts

    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        commit = found.stdout.strip()
    except OSError:
        commit = ""
    return {"cores": cores(), "commit": commit, "facts": facts()}
