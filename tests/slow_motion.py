"""Oracle for metastable flows: weighted tokens in mpmath, by Gragg's extrapolated midpoint rule.

It shares nothing with the package: another arithmetic, another integrator, another clock, another way to find times.
"""

from mpmath import mp, mpf

LEVELS = 9  # sequences 2, 4, .. 18: order 18
MERGE = mpf(10) ** -9
TOLERANCE = mpf(10) ** -12


def velocities(x, w, beta, kind):
    """(P_i sum_j c_ij x_j, sum of the c_ij with j != i) for V = B = I: softmax, or exponential in the clock without e^beta."""
    n, d = len(x), len(x[0])
    s = [[sum(a * b for a, b in zip(x[i], x[j], strict=True)) for j in range(n)] for i in range(n)]
    k = [[mp.exp(beta * (s[i][j] - 1)) if j < i else mpf(0) for j in range(n)] for i in range(n)]
    out, rate = [], mpf(0)
    for i in range(n):
        c = [w[j] * (1 if i == j else k[max(i, j)][min(i, j)]) for j in range(n)]
        total = sum(c) if kind == "softmax" else 1
        rate += sum(c[j] for j in range(n) if j != i) / total
        out.append([sum(c[j] * (x[j][a] - s[i][j] * x[i][a]) for j in range(n) if j != i) / total for a in range(d)])
    return out, rate


def energy(x, w, beta):
    """sum_ij w_i w_j exp(beta (cos - 1))."""
    pairs = ((i, j) for i in range(len(x)) for j in range(len(x)))
    return sum(w[i] * w[j] * mp.exp(-beta * distance(x[i], x[j]) ** 2 / 2) for i, j in pairs)


def distance(a, b):
    return mp.sqrt(sum((u - v) ** 2 for u, v in zip(a, b, strict=True)))


def unit(a):
    length = mp.sqrt(sum(u * u for u in a))
    return [u / length for u in a]


def nearest(x):
    return min((distance(x[i], x[j]), i, j) for i in range(len(x)) for j in range(i))


def plus(y, v, c):
    return [[a + c * b for a, b in zip(p, q, strict=True)] for p, q in zip(y, v, strict=True)]


def step(f, y, h):
    """The state [*tokens, [t]] a step h on, and an error estimate: the modified midpoint rule, extrapolated in its step squared."""
    start, table = f(y), []
    for level in range(LEVELS):
        m = 2 * (level + 1)
        g = h / m
        old, new = y, plus(y, start, g)
        for _ in range(1, m):
            old, new = new, plus(old, f(new), 2 * g)
        row = [plus(plus(old, plus(new, old, -1), mpf(1) / 2), f(new), g / 2)]
        for k in range(level):
            ratio = mpf(m) / (2 * (level - k))
            row.append(plus(row[k], plus(row[k], table[k], -1), 1 / (ratio**2 - 1)))
        table = row
    best, worse = table[-1], table[-2]
    error = max(distance(a, b) for a, b in zip(best[:-1], worse[:-1], strict=True))
    error = max(error, abs(best[-1][0] - worse[-1][0]) / abs(best[-1][0]))
    return [*map(unit, best[:-1]), best[-1]], error


def follow(x, w, beta, kind, *, marks=(), last=None):
    """ln t at which the functions `marks` of (x, w) fall through 0; tokens within 1e-9 of each other are merged.

    The clock is the sum of all pulls. Ends when one token is left, or, with its ln t in front, when the distance of the
    last two falls below `last`.
    """
    w, beta = [mpf(a) for a in w], mpf(beta)
    y, h, found = [*([mpf(a) for a in p] for p in x), [mpf(10) ** -9]], mpf(1) / 8, [None] * len(marks)

    def f(y):
        v, rate = velocities(y[:-1], w, beta, kind)
        return [*([a / rate for a in p] for p in v), [1 / rate]]

    def end(x, w):
        return nearest(x)[0] - (last if last and len(x) == 2 else MERGE)

    def log_t(mark, h):
        low, high = (mpf(0), mark(y[:-1], w)), (h, mark(step(f, y, h)[0][:-1], w))
        for _ in range(60):  # Illinois
            middle = high[0] - high[1] * (high[0] - low[0]) / (high[1] - low[1])
            at = step(f, y, middle)[0]
            value = mark(at[:-1], w)
            if abs(value) < mpf(10) ** -15:
                break
            low = high if value * high[1] < 0 else (low[0], low[1] / 2)
            high = middle, value
        return mp.log(at[-1][0])

    while len(y) > 2:
        new, error = step(f, y, h)
        scale = mpf("0.8") * (TOLERANCE / max(error, mpf(10) ** -40)) ** (mpf(1) / (2 * LEVELS - 1))
        h, taken = min(h * min(max(scale, mpf("0.1")), 4), 4), h
        if error > TOLERANCE:
            continue
        for k, mark in enumerate(marks):
            if mark(y[:-1], w) > 0 >= mark(new[:-1], w):
                found[k] = log_t(mark, taken)
        if end(new[:-1], w) < 0:
            if last and len(w) == 2:
                return [log_t(end, taken), *found]
            _, i, j = nearest(new[:-1])
            total = w[i] + w[j]
            new[j] = unit([(w[i] * a + w[j] * b) / total for a, b in zip(new[i], new[j], strict=True)])
            w = [total if k == j else w[k] for k in range(len(w)) if k != i]
            new = [new[k] for k in range(len(new)) if k != i]
        y = new
    return found
