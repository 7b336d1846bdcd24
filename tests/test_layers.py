"""The architecture: a module imports only from lower floors."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "attnflow"

FLOORS = [
    ["exponential"],
    ["sphere", "tiles", "mesh", "store", "facts", "points", "memory"],
    ["reduce", "captured"],
    ["harmonics", "sharded", "kernel", "transport", "heads", "schema"],
    ["attention"],
    ["field", "theory", "constrained"],
    ["observe", "stepping", "trajectory", "files", "normalization"],
    ["validate", "checkpoints"],
    ["solve"],
    ["lanes", "dataset", "noisy"],
    ["workers", "descent"],
    ["metastable", "longrun", "claims", "onset", "equilibria", "fit", "survey", "sweep", "pretrained", "phases"],
    ["dominance"],
    ["plots", "verify"],
    ["report"],
    ["specs"],
    ["config"],
    ["run", "figures", "fitting"],
    ["studies"],
    ["cells", "gallery"],
    ["cli"],
    ["__main__"],
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}


def sources():
    return [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]


def room(path):
    """The floor-table name of a file: the module, or the subpackage it lies in."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def internal_imports(path):
    """Names of attnflow modules that a file imports, whatever the spelling."""
    depth = len(path.relative_to(PACKAGE).parts) - 1
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level == 0 and module[0] == "attnflow":
                yield from [module[1]] if len(module) > 1 else [a.name for a in node.names]
            elif node.level == depth + 1:
                yield from [module[0]] if module[0] else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("attnflow."))


def test_every_module_has_a_floor():
    missing = {room(p) for p in sources()} - set(FLOOR)
    assert not missing, f"no floor for {sorted(missing)}"


def test_modules_import_only_from_lower_floors():
    upward = [
        (str(p.relative_to(PACKAGE)), name)
        for p in sources()
        for name in internal_imports(p)
        if name != room(p) and FLOOR[name] >= FLOOR[room(p)]
    ]
    assert not upward, f"imports that do not go down: {upward}"


def test_files_stay_short():
    long = {str(p.relative_to(PACKAGE)): n for p in sources() if (n := len(p.read_text().splitlines())) > 330}
    assert not long, f"files over 330 lines: {long}"
