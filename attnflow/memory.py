"""How much memory there is, and a refusal, with the estimate, of a run that cannot fit into it."""

from pathlib import Path

import jax


def available(device: jax.Device | None = None) -> int | None:
    """Bytes free for this process on a device (default: the first): its own memory, or on a CPU the machine's or the container's."""
    device = jax.local_devices()[0] if device is None else device
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    free = [_machine(), _container()]
    return min((b for b in free if b is not None), default=None)


def refuse_more_than(free: int | None, needs: dict[str, int], remedy: str) -> None:
    """MemoryError where the parts of a run, in bytes by name, need more than is free; nothing is known of a None."""
    total = sum(needs.values())
    if free is None or total <= free:
        return
    parts = ", ".join(f"{name} {_readable(size)}" for name, size in needs.items() if size > total / 20)
    raise MemoryError(f"this run needs about {_readable(total)} ({parts}) and {_readable(free)} are free: {remedy}.")


def _readable(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """What a container's limit leaves, where there is one (cgroup 2)."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
