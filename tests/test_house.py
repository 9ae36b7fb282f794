"""The house: rooms import only rooms below them, and the package stays thin."""

import ast

from pumalib import paths

ROOMS = ["paths", "config", "data", "models", "losses", "evaluation", "embedder", "index", "training", "study", "figures", "__main__"]
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
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "pumalib")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            if base.split(".")[0] == "pumalib":
                yield from (f"{base}.{n.name}" if f"{base}.{n.name}" in MODULES else base for n in node.names)


def room(name):
    return (name.split(".") + ["__init__"])[1]


def test_there_are_few_rooms_and_each_imports_only_rooms_below_it():
    assert {room(name) for name in MODULES} == {*ROOMS, "__init__"}
    for name, file in MODULES.items():
        for other in imports(file):
            if room(other) != room(name):
                assert ROOMS.index(room(other)) < ROOMS.index(room(name)), f"{name} imports {other}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: set(imports(file)) - {name} for name, file in MODULES.items()}

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        for other in graph.get(name, ()):
            visit(other, [*path, name])

    for name in graph:
        visit(name, [])
