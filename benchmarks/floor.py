"""The floor under every number here: what this machine's cores can do, measured in the same run.

Hand-written C (floor.c), compiled when gcc is there: peak multiply-add rate, rate of 2^x in cache, time of one fused
attention pair, and numpy's copy bandwidth and matrix product. `calls` turns the floor into a contestant of a contest.
"""

import ctypes
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from .measure import NotRun, Recorder, cores

FUSED = (2, 3, 4, 8)  # dimensions with a fused kernel; from 16 on the two products are the floor


@cache
def library() -> ctypes.CDLL | None:
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        return None
    target = Path(tempfile.mkdtemp(prefix="attnflow-floor-")) / "floor.so"
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    source = Path(__file__).with_suffix(".c")
    if subprocess.run([compiler, *flags, "-o", str(target), str(source)], capture_output=True).returncode != 0:
        return None
    return ctypes.CDLL(str(target))


def aligned(shape, dtype) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def pointer(a: np.ndarray):
    return a.ctypes.data_as(ctypes.c_void_p)


def in_threads(call, parts: int):
    """`call(part)` on every core at once; C calls release the interpreter."""
    if parts == 1:
        return call(0)
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(call, range(parts)))


def evaluation(q: np.ndarray, keys: np.ndarray):
    """A call that computes sums of e^<q,k> k and e^<q,k> at the floor: fused for few dimensions, else the products' flops."""
    lib, (n, d), dtype = library(), q.shape, q.dtype
    if lib is None:
        return NotRun("no C compiler")
    parts = cores()
    if d not in FUSED:
        return multiply_adds(dtype, n * len(keys) * (2 * d + 1) / parts, parts)
    rows = -(-n // (4 * parts)) * 4
    bits, columns, out = (
        aligned((rows * parts, d), dtype),
        aligned((d, len(keys)), dtype),
        aligned((rows * parts, d + 1), dtype),
    )
    bits[:] = 0
    bits[:n] = q * np.log2(np.e)
    columns[:] = keys.T
    kernel = getattr(lib, f"pair_{dtype.name}_{d}")

    def part(i):
        block = slice(i * rows, (i + 1) * rows)
        kernel(
            pointer(bits[block]),
            pointer(columns),
            pointer(out[block]),
            ctypes.c_size_t(rows),
            ctypes.c_size_t(len(keys)),
        )

    def call():
        in_threads(part, parts)
        return out[:n, :d] / out[:n, d:]

    return call


def multiply_adds(dtype, count: float, parts: int):
    """A call that does so many multiply-adds on each of `parts` cores."""
    lib = library()
    width = 64 // np.dtype(dtype).itemsize
    kernel = getattr(lib, f"fma_{np.dtype(dtype).name}")
    kernel.restype, kernel.argtypes = ctypes.c_double, [ctypes.c_size_t]
    rounds = int(count / (12 * width))
    return lambda: in_threads(lambda _: kernel(rounds), parts)


def main(recorder: Recorder) -> None:
    lib, parts, scale = library(), cores(), 0.01 if recorder.tiny else 1.0
    for dtype in (np.float64, np.float32):
        name = np.dtype(dtype).name
        size = 256 if recorder.tiny else 1024
        a = np.random.default_rng(0).standard_normal((size, size)).astype(dtype)
        count = scale * 2e9
        contestants = {"matrix product of numpy": lambda a=a: a @ a}
        units = {"matrix product of numpy": 2.0 * size**3}
        if lib is None:
            contestants["multiply-add"] = NotRun("no C compiler")
        else:
            contestants["multiply-add"] = multiply_adds(dtype, count / parts, parts)
            units["multiply-add"] = 2 * count
        for contestant, call in contestants.items():
            recorder.contest("floor: flops", {"dtype": name}, {contestant: call}, units=units.get(contestant, 1.0))
        if lib is not None:
            x, y, rounds = aligned(1024, dtype), aligned((parts, 1024), dtype), int(scale * 1e5)
            x[:] = np.linspace(-20, 0, 1024)
            kernel = getattr(lib, f"exp_{name}")
            call = lambda i, k=kernel, x=x, y=y, r=rounds: k(  # noqa: E731
                pointer(x), pointer(y[i]), ctypes.c_size_t(1024), ctypes.c_size_t(r)
            )
            once = lambda call=call, y=y: (in_threads(call, parts), y)[1]  # noqa: E731
            off = lambda y, x=x: np.max(np.abs(y[0] / np.exp2(x.astype(float)) - 1))  # noqa: E731
            recorder.contest("floor: 2^x", {"dtype": name}, {"by hand": once}, units=1024.0 * rounds * parts, error=off)
            for d in FUSED:
                n = 512 if recorder.tiny else 4096
                tokens = np.random.default_rng(0).standard_normal((n, d))
                tokens = (tokens / np.linalg.norm(tokens, axis=1, keepdims=True)).astype(dtype)
                fused = evaluation(4 * tokens, tokens)
                recorder.contest("floor: pair", {"dtype": name, "d": d}, {"by hand": fused}, units=float(n * n))
    big = np.ones(1_000_000 if recorder.tiny else 16_000_000)
    other = np.empty_like(big)
    recorder.contest("floor: copy", {}, {"numpy": lambda: np.copyto(other, big)}, units=16.0 * big.size)
