"""What a function reads besides its arguments: the numbers a compiled program would silently keep.

Tracing bakes in every array that a function finds in a closure, default or global; changing the array later
does not change the answer. A sweep refuses such functions, and knows the others by their code and constants.
"""

import contextlib
import dis
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .points import is_array


def refuse_captured_arrays(run: Callable) -> None:
    """Raise ValueError where `run`, or a helper in its module, reads an array from outside its arguments."""
    for name, value in _reads(run):
        if any(is_array(leaf) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"`run` must not read the array `{name}` from outside: the compiled sweep would keep its old "
                f"value. Make `{name}` a parameter of `run` and pass it as `shared=({name},)`."
            )


def fingerprint(run: Callable) -> str:
    """Sha256 of the code of `run` and of the helpers in its module, and of the constants they read.

    Comments, line numbers and other modules do not count: those are known by the recorded versions.
    """
    parts = [described(part) for function in _functions(run) for part in _code(function.__code__)]
    parts += sorted(f"{name}={described(value)}" for name, value in _reads(run) if not _is_code(value))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def described(value: Any) -> str:
    """A value's repr without memory addresses and set order, which change from process to process."""
    if isinstance(value, frozenset | set):
        return described(sorted(map(repr, value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def plain_function(run: Callable) -> types.FunctionType:
    """The function under `functools.partial` and decorators; ValueError where there is none."""
    function = inspect.unwrap(run.func if isinstance(run, functools.partial) else run)
    if not isinstance(function, types.FunctionType):
        raise ValueError(f"`run` must be a function of one point's parameters, got {type(run).__name__}.")
    return function


def qualified_name(run: Callable) -> str:
    """`module:function` of the plain function."""
    function = plain_function(run)
    return f"{function.__module__}:{function.__qualname__}"


def _functions(run: Callable) -> list[types.FunctionType]:
    """The function and those it reaches in its own module, each once."""
    first = plain_function(run)
    found = [first]
    for function in found:  # grows while it runs
        for _, value in _read_by(function):
            helper = inspect.unwrap(value) if callable(value) else None
            if isinstance(helper, types.FunctionType) and helper.__module__ == first.__module__:
                found += [] if helper in found else [helper]
    return found


def _reads(run: Callable) -> Iterator[tuple[str, Any]]:
    """Names and values that the functions find outside their arguments."""
    if isinstance(run, functools.partial):
        yield from run.keywords.items()
        yield from ((f"argument {i}", value) for i, value in enumerate(run.args))
    for function in _functions(run):
        yield from _read_by(function)


def _read_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell not filled yet
            yield name, cell.cell_contents
    names = {
        step.argval
        for code in _codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname == "LOAD_GLOBAL"
    }
    yield from ((name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys()))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it: lambdas, comprehensions, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code(code: types.CodeType) -> Iterator[Any]:
    for part in _codes(code):
        yield part.co_code
        yield part.co_names
        yield from (constant for constant in part.co_consts if not isinstance(constant, types.CodeType))


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, types.ModuleType)
