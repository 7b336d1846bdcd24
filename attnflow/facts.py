"""What decides the bits of a result besides the program and its input."""

import contextlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax


def facts() -> dict:
    """Versions, device kind and count, instruction set, CPU threads, precision settings, as JSON.

    Equal facts, chunk shape and dtype give equal bits; otherwise results agree to rounding only. The
    thread count is `NPROC` where set (XLA obeys it), else the cores the process may use; 0 off the CPU.
    """
    devices = jax.local_devices()
    return {
        "versions": {name: version(name) for name in ("attnflow", "jax", "jaxlib", "equinox", "diffrax")},
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processor": f"{platform.machine()} {_vector_unit()}".strip(),
        "threads": threads() if devices[0].platform == "cpu" else 0,
        "x64": bool(jax.config.values["jax_enable_x64"]),
        "matmul": str(jax.config.values["jax_default_matmul_precision"]),
    }


def threads() -> int:
    """CPU threads XLA may use: `NPROC` where set (XLA obeys it), else the cores of this process."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return int(os.environ.get("NPROC", len(affinity(0)) if affinity else os.cpu_count() or 1))


def _vector_unit() -> str:
    """The widest x86 vector extension, if the system tells; XLA's order of summation follows it."""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return next((name for name in ("avx512f", "avx2", "sse4_2") if name in flags), "")
    return ""
