"""TOML tables into frozen dataclasses: unknown keys, wrong types and impossible values are one line with the key's path."""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message starts with the key's path."""


def build(cls: Any, table: Any, path: str = "") -> Any:
    """An instance of the dataclass `cls` from a TOML table; nested dataclasses and unions by their `kind` key."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path or 'the file'}: must be a table, got {_kind(table)}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(fields)}."
            raise ConfigError(f"{_join(path, key)}: unknown key{hint}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        here = _join(path, name)
        if name in table:
            values[name] = convert(hints[name], table[name], here)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{here}: is required.")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path or 'the file'}: {error}") from None


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type, or a ConfigError; whole numbers count as reals, a scalar as a list of one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(args, value, path)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{path}: must be one of {', '.join(map(repr, args))}, got {value!r}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(
                f"{path}: must be finite, got {value:.3g}." if isinstance(value, float) else f"{path}: is too large."
            )
        return number
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, hint):
        raise ConfigError(f"{path}: must be {_NAMES.get(hint, hint.__name__)}, got {_kind(value)} {value!r}.")
    return value


def _union(args, value, path):
    if value is None or (type(None) in args and value == "none"):
        return None
    choices = [a for a in args if a is not type(None)]
    if len(choices) == 1:
        return convert(choices[0], value, path)
    tagged = {a.kind: a for a in choices if hasattr(a, "kind")}
    if not tagged:
        return convert(choices[0], value, path)
    if not isinstance(value, dict) or "kind" not in value:
        raise ConfigError(f"{path}: must be a table with `kind`, one of {', '.join(sorted(tagged))}.")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in tagged:
        near = difflib.get_close_matches(str(kind), tagged, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path}.kind: must be one of {', '.join(sorted(tagged))}, got {kind!r}{hint}")
    return build(tagged[kind], {k: v for k, v in value.items() if k != "kind"}, path)


def to_table(config: Any) -> Any:
    """The inverse of `build`: plain tables, lists and numbers, with the kinds written out."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        table = {"kind": config.kind} if hasattr(config, "kind") else {}
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if value is not None:
                table[f.name] = to_table(value)
        return table
    if isinstance(config, tuple | list):
        return [to_table(v) for v in config]
    return config


def to_toml(table: dict, path: str = "") -> str:
    """A table as TOML: scalars and lists first, then sub-tables."""
    lines = [f"{key} = {_literal(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            here = _join(path, key)
            lines += ["", f"[{here}]", to_toml(value, here).rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def override(table: dict, assignment: str) -> None:
    """Apply `a.b.c=value` to a parsed table in place; the value is read as TOML, else as a string."""
    import tomllib

    key, sign, text = assignment.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {assignment!r}: must read key=value, for example solve.rtol=1e-8.")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        value = text.strip()
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {assignment!r}: {parent} is not a table.")
    table[last] = value


_NAMES = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}


def _kind(value):
    names = {bool: "boolean", int: "whole number", float: "number", str: "string", list: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)


def _join(path, key):
    return f"{path}.{key}" if path else key


def _literal(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    return repr(value)
