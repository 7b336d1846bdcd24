"""report.md from the JSON lines: the targets first, each with the number reached, then every contest as a table."""

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Target(NamedTuple):
    """`quantity` of a contest compared with `limit`; ratios are of median times, rival over attnflow unless turned."""

    claim: str
    name: str
    where: dict
    contestant: str
    rival: str | None  # None: the value itself
    limit: float
    at_most: bool = False
    quantity: str = "median_s"
    rival_cores: int | None = None
    rival_name: str | None = None  # of its contest, if not the same
    rival_where: dict | None = None  # where the rival's line lies, if not beside
    scale: float = 1  # of the rival's quantity


ONE, TWO = {"cores": 1}, {"cores": 2}
F64, F32 = {"dtype": "float64"}, {"dtype": "float32"}
BIG64, BIG32 = {"n": 16384, "d": 3, **F64}, {"n": 16384, "d": 3, **F32}


def per_dimension():
    for d, dtype, limit in ((16, "float64", 2), (64, "float64", 2), (16, "float32", 1.3), (64, "float32", 1)):
        yield Target(
            f"evaluation, d = {d}, {dtype}, against torch sdpa",
            "evaluation",
            {**ONE, "d": d, "n": 4096, "dtype": dtype},
            "attnflow",
            "torch sdpa",
            limit,
        )


EVALUATION = [
    Target("one core, against the floor", "evaluation", {**ONE, **BIG64}, "floor", "attnflow", 1.15, at_most=True),
    Target("against torch sdpa", "evaluation", {**ONE, **BIG64}, "attnflow", "torch sdpa", 3),
    Target("against naive jax", "evaluation", {**ONE, **BIG64}, "attnflow", "jax, naive", 7),
    Target("against numpy", "evaluation", {**ONE, **BIG64}, "attnflow", "numpy", 20),
    Target("error", "evaluation", {**ONE, **BIG64}, "attnflow", None, 1e-14, at_most=True, quantity="error"),
    Target(
        "memory, bytes", "evaluation", {**ONE, **BIG64}, "attnflow", None, 2**26, at_most=True, quantity="peak_bytes"
    ),
]


def million():
    at = {"n": 10**6, "d": 2, "beta": 81.0, "heads": "scalar"}
    against = "harmonics against exact sums"
    for place, where, error, time in (
        ("circle, n = 10^6, beta = 81", at, 1e-12, 1000),
        ("S^2, n = 10^6, beta = 25", at | {"d": 3, "beta": 25.0}, 1e-6, 3000),
        ("S^2, the same, a general B", at | {"d": 3, "beta": 25.0, "heads": "general"}, 1e-6, 3000),
    ):
        for quantity, limit, name in (("error", error, "relative error"), ("ns_per_unit", time, "ns per token")):
            yield Target(f"{place}, {name}", "a million tokens", where, "harmonics", None, limit, True, quantity)
    small = {"n": 16384, "d": 2, "beta": 81.0}
    yield Target("circle, n = 16384, beta = 81, against exact sums", against, small, "harmonics", "blocked", 40)
    yield Target(
        "circle, n = 10^6, the same, extrapolated",
        "a million tokens",
        at,
        "harmonics",
        "blocked",
        1000,
        rival_where=small,
        rival_name=against,
        scale=(10**6 / 16384) ** 2,
    )
    for quantity, limit, name in (("median_s", 120, "seconds"), ("peak_bytes", 2**31, "bytes")):
        claim = f"solve of 10^6 weighted tokens on the circle, {name}"
        yield Target(claim, "trajectory of a million tokens", {"n": 10**6}, "harmonics", None, limit, True, quantity)


TARGETS = [
    *(t._replace(claim=f"evaluation, n = 16384, d = 3, f64: {t.claim}") for t in EVALUATION),
    Target("the same in f32, against the floor", "evaluation", {**ONE, **BIG32}, "floor", "attnflow", 2, at_most=True),
    Target("the same in f32, against torch sdpa", "evaluation", {**ONE, **BIG32}, "attnflow", "torch sdpa", 3),
    *per_dimension(),
    Target(
        "both cores over one, n = 16384, f64",
        "evaluation",
        {**TWO, **BIG64},
        "attnflow",
        "attnflow",
        1.5,
        rival_cores=1,
    ),
    Target(
        "gradient over own forward, d = 3, f64",
        "gradient",
        {**ONE, **BIG64},
        "attnflow forward",
        "attnflow",
        3.5,
        at_most=True,
    ),
    Target(
        "gradient over own forward, d = 16, f32",
        "gradient",
        {**ONE, "n": 16384, "d": 16},
        "attnflow forward",
        "attnflow",
        3.5,
        at_most=True,
    ),
    Target("gradient against torch sdpa, d = 3, f64", "gradient", {**ONE, **BIG64}, "attnflow", "torch sdpa", 3),
    *(
        Target(
            f"memory, n = {n}, {job}, bytes", "memory", {"n": n, "job": job}, "attnflow", None, b, True, "peak_bytes"
        )
        for n, b in ((16384, 2**26), (100_000, 2**27))
        for job in ("evaluation", "gradient")
    ),
    Target("trajectory f64 against torchdiffeq + sdpa", "trajectory", F64, "attnflow", "torchdiffeq + sdpa", 3),
    Target(
        "trajectory f64, float32 tiles, the same", "trajectory", F64, "attnflow, float32 tiles", "torchdiffeq + sdpa", 6
    ),
    Target("trajectory f32 against torchdiffeq + sdpa", "trajectory", F32, "attnflow", "torchdiffeq + sdpa", 2.5),
    *(
        Target(f"trajectory f64 against {rival}", "trajectory", F64, "attnflow", rival, limit)
        for rival, limit in (("torchdiffeq + explicit softmax", 8), ("numpy + scipy", 8), ("jax naive + diffrax", 6))
    ),
    *million(),
    Target(
        "phase diagram per seed, against the published loop",
        "phase diagram",
        {},
        "attnflow",
        "Euler loop, pairs and ranks",
        20,
    ),
    Target("sweep of beta from 1 to 100, lane waste", "lane waste", {}, "attnflow", None, 1.2, True, "waste"),
    Target("programs for that sweep", "lane waste", {}, "attnflow", None, 1, True, "programs"),
    *(
        Target(
            f"gradient of a solve over its forward pass, n = {n}",
            "gradient of a solve",
            {"n": n},
            "forward",
            "reverse",
            4,
            True,
        )
        for n in (256, 512)
    ),
    Target("programs for a sweep of beta", "recompilation", {}, "attnflow", None, 1, at_most=True, quantity="programs"),
    Target(
        "GPU, n = 10^5, d = 3, float32, share of the exp limit, no TF32", "gpu", {"n": 10**5}, "kernel", "floor", 0.5
    ),
]
NOT_HERE = {
    "GPU: sweep of 10^4 small systems in one launch sequence": "no GPU in this run",
}


def read(folder: Path) -> list[dict]:
    return [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]


def find(lines, name, where, contestant):
    """The last line that matches, or None."""
    for line in reversed(lines):
        facts = {"cores": line["cores"], **line["params"]}
        same = all(facts.get(key) == value for key, value in where.items())
        if line["name"] == name and line["contestant"] == contestant and same:
            return line
    return None


def verdict(lines, target: Target) -> tuple[str, str]:
    """(measured, met or missed or why not run)."""
    mine = find(lines, target.name, target.where, target.contestant)
    if mine is None or "not_run" in mine:
        return "", f"not run: {mine['not_run']}" if mine else "not run"
    value = mine.get(target.quantity)
    if target.rival is not None:
        where = target.where if target.rival_where is None else target.rival_where
        where = where if target.rival_cores is None else {**where, "cores": target.rival_cores}
        rival = find(lines, target.rival_name or target.name, where, target.rival)
        if rival is None or "not_run" in rival:
            return "", f"not run: {rival['not_run']}" if rival else "not run"
        value = target.scale * rival[target.quantity] / value
    met = value <= target.limit if target.at_most else value >= target.limit
    return f"{value:.3g}", "met" if met else "**missed**"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows), ""]


def number(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(folder: Path) -> Path:
    """Write report.md into the folder of the results."""
    lines = read(folder)
    text = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks report`; ratios hold within one run on one machine.",
        "",
    ]
    if lines:
        facts = lines[-1]["facts"]
        text += [
            f"{facts['processor']}, {facts['device']}, versions {facts['versions']}, commit {lines[-1]['commit']}.",
            "",
        ]
    rows = []
    for target in TARGETS:
        measured, state = verdict(lines, target)
        rows.append([target.claim, f"{'<=' if target.at_most else '>='} {number(target.limit)}", measured, state])
    rows += [[claim, "", "", f"not run: {reason}"] for claim, reason in NOT_HERE.items()]
    text += ["## Targets", "", *table(["claim", "target", "measured", ""], rows)]
    contests = defaultdict(list)
    for line in lines:
        contests[line["name"], json.dumps(line["params"], sort_keys=True), line["cores"]].append(line)
    hidden = {"name", "contestant", "params", "cores", "commit", "facts"}
    by_name = defaultdict(list)
    for (name, _, _), group in contests.items():
        by_name[name].append(group)
    for name, groups in by_name.items():
        columns = list(dict.fromkeys(key for group in groups for line in group for key in line if key not in hidden))
        parameters = list(dict.fromkeys(key for group in groups for line in group for key in line["params"]))
        rows = [
            [
                str(line["cores"]),
                *(number(line["params"].get(p, "")) for p in parameters),
                line["contestant"],
                *(number(line.get(c, "")) for c in columns),
            ]
            for group in groups
            for line in group
        ]
        text += [f"## {name}", "", *table(["cores", *parameters, "contestant", *columns], rows)]
    path = folder / "report.md"
    path.write_text("\n".join(text))
    return path
