"""The house: rooms import only rooms below them, and none goes in a circle."""

import ast
import re

from pumalib import paths

# From the ground up.
ROOMS = [
    "paths",
    "config",
    "progress",
    "terminal",
    "data",
    "models",
    "losses",
    "evaluation",
    "export",
    "embedder",
    "index",
    "search_page",
    "training",
    "study",
    "figures",
    "report",
    "api",
    "__main__",
    "__init__",
]
PACKAGE = paths.ROOT / "pumalib"
FILES = sorted(PACKAGE.rglob("*.py"))


def module(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(file): file for file in FILES}


def imports(file):
    """The modules of pumalib that a file imports, also inside functions."""
    here = module(file)
    package = here if file.name == "__init__.py" else here.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = origin(node, package)
            for name in node.names:
                below = f"{base}.{name.name}"
                found.append(below if below in MODULES else base)
    return [name for name in found if name.split(".")[0] == "pumalib"]


def origin(node, package):
    """The module that a `from ... import` in a package is from."""
    if not node.level:
        return node.module
    above = package.split(".")
    parts = above[: len(above) + 1 - node.level]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def room(name):
    return [*name.split("."), "__init__"][1]


def test_every_room_imports_only_rooms_below_it():
    assert {room(name) for name in MODULES} == set(ROOMS)
    for name, file in MODULES.items():
        for other in imports(file):
            if room(other) != room(name):
                below = ROOMS.index(room(other)) < ROOMS.index(room(name))
                assert below, f"{name} imports {other}"


def test_models_know_no_data_and_only_the_package_itself_the_public_functions():
    for name, file in MODULES.items():
        rooms = {room(other) for other in imports(file)}
        assert room(name) != "models" or "data" not in rooms, name
        assert name == "pumalib" or room(name) == "api" or "api" not in rooms, name


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: set(imports(file)) - {name} for name, file in MODULES.items()}

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        for other in graph.get(name, ()):
            visit(other, [*path, name])

    for name in graph:
        visit(name, [])


def test_the_tests_that_reliability_names_are_there():
    """Its promises are lists of files with the tests in them, each in backticks."""
    page = (paths.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    found = 0
    for line in re.findall(r"^- `tests/.*", page, re.MULTILINE):
        file, *names = re.findall(r"`([^`]+)`", line)
        text = (paths.ROOT / file).read_text(encoding="utf-8")
        for name in names:
            if name.startswith(("test_", "a_")):
                found += 1
                assert f"def {name}(" in text, f"docs/reliability.md: no {name} in {file}"
    assert found > 30
