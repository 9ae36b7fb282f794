"""The house: three packages in one direction, rooms import only rooms below, none in a circle."""

import ast
import json
import re

from pumalib import paths

# What each may import: itself, and these.
PACKAGES = {"pumalib": [], "puma_study": ["pumalib"], "tools": ["pumalib", "puma_study"]}
# The rooms of the library, from the ground up.
ROOMS = [
    "paths",
    "config",
    "progress",
    "data",
    "models",
    "losses",
    "evaluation",
    "export",
    "embedder",
    "index",
    "search_page",
    "training",
    "terminal",
    "options",
    "cluster",
    "embed_parts",
    "api",
    "__main__",
    "__init__",
]
FILES = [file for package in PACKAGES for file in sorted((paths.ROOT / package).rglob("*.py"))]


def module(file):
    parts = file.relative_to(paths.ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(file): file for file in FILES}


def imports(text, package=""):
    """The modules of the three packages that a program imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = origin(node, package)
            for name in node.names:
                below = f"{base}.{name.name}"
                found.append(below if below in MODULES else base)
    return [name for name in found if package_of(name) in PACKAGES]


def origin(node, package):
    """The module that a `from ... import` in a package is from."""
    if not node.level:
        return node.module
    above = package.split(".")
    parts = above[: len(above) + 1 - node.level]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def imports_of(name):
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    return imports(file.read_text(encoding="utf-8"), package)


def package_of(name):
    return name.split(".")[0]


def room(name):
    return [*name.split("."), "__init__"][1]


IMPORTS = {name: imports_of(name) for name in MODULES}


def test_packages_import_in_one_direction():
    for name, found in IMPORTS.items():
        own = package_of(name)
        for other in found:
            assert package_of(other) in [own, *PACKAGES[own]], f"{name} imports {other}"


def test_no_notebook_imports_the_workshop():
    notebooks = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for file in notebooks:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            if cell["cell_type"] == "code":
                found = imports("".join(cell["source"]))
                assert "tools" not in map(package_of, found), file.name


def test_every_room_of_the_library_imports_only_rooms_below_it():
    library = {name: found for name, found in IMPORTS.items() if package_of(name) == "pumalib"}
    assert {room(name) for name in library} == set(ROOMS)
    for name, found in library.items():
        for other in found:
            if room(other) != room(name):
                below = ROOMS.index(room(other)) < ROOMS.index(room(name))
                assert below, f"{name} imports {other}"


def test_models_know_no_data_and_only_the_package_itself_the_public_functions():
    for name, found in IMPORTS.items():
        if package_of(name) == "pumalib":
            rooms = {room(other) for other in found}
            assert room(name) != "models" or "data" not in rooms, name
            assert name == "pumalib" or room(name) == "api" or "api" not in rooms, name


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: set(found) - {name} for name, found in IMPORTS.items()}

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
