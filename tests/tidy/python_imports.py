"""Rules about imports within python/strata: rooms only look down, and nothing goes in circles.

A module's room is its folder below python/strata; what lies in python/strata itself is the root, above all rooms, and
so is python/strata/utils, which only gathers names for scripts.
Imports within functions count like any other, since they are where a cycle hides. The extension module `strata._C`
is below every room. `check` returns its findings as text, one a violation, with the file and line where it is.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

PACKAGE = "strata"
FOLDER = "python/strata"
# lowest first; the root is above them
ROOMS = ("views", "model", "tiles", "ranks", "sequence", "monitoring", "ops", "checkpoint", "importing", "exporting")
ROOT_FOLDERS = ("utils",)  # that are of the root
ABOVE_ROOT = ("compat", "integrations")  # rooms that only stand on the root: what other libraries ask for
EXTENSION = f"{PACKAGE}._C"


class Import(NamedTuple):
    line: int
    module: str  # absolute: "strata.model.parameter"


class Module(NamedTuple):
    path: str  # from the root of the sources
    room: str  # "" for the root
    imports: list[Import]


def module_name(path: Path) -> str:
    """Of a path from python/: "strata.model" for strata/model/__init__.py."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, package: str) -> list[str]:
    """The absolute names that a statement imports: of `from .model import ownership`, "strata.model.parameter", be that
    a     module or a name within one. `package` is what a relative import of one dot starts from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        base = ".".join(parents[:len(parents) - node.level + 1] + ([base] if base else []))
    return [f"{base}.{alias.name}" for alias in node.names]


def parse_tree(root: Path) -> dict[str, Module]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / FOLDER).rglob("*.py"))
             if "__pycache__" not in path.parts}
    names = {module_name(path.relative_to(root / "python")): path for path in texts}
    modules = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imports = []
        for node in ast.walk(ast.parse(texts[path])):
            for target in imported_names(node, package):
                if target.split(".")[0] != PACKAGE or f"{target}.".startswith(f"{EXTENSION}."):
                    continue
                if target not in names and isinstance(node, ast.ImportFrom):
                    target = target.rpartition(".")[0]  # a name within a module
                    if f"{target}.".startswith(f"{EXTENSION}."):
                        continue
                imports.append(Import(node.lineno, target))
        folders = path.relative_to(root / FOLDER).parts[:-1]
        room = folders[0] if folders and folders[0] not in ROOT_FOLDERS else ""
        modules[name] = Module(path.relative_to(root).as_posix(), room, imports)
    return modules


def height(room: str) -> int:
    if room in ABOVE_ROOT:
        return len(ROOMS) + 1
    return ROOMS.index(room) if room else len(ROOMS)


def upward_imports(modules: dict[str, Module]) -> list[str]:
    findings = []
    for module in modules.values():
        if module.room and module.room not in ROOMS + ABOVE_ROOT:
            rooms = ", ".join(ROOMS + ABOVE_ROOT)
            findings.append(f"{module.path}:1: is in no room of {FOLDER}; the rooms are {rooms}")
            continue
        for line, target in module.imports:
            if target not in modules:
                findings.append(f"{module.path}:{line}: imports {target}, which is not there")
                continue
            room = modules[target].room
            if room and room not in ROOMS + ABOVE_ROOT:
                continue  # reported at that module
            if height(room) > height(module.room):
                higher = f"the higher room {room}" if room else "the root"
                own = f"room {module.room}" if module.room else "the root"
                findings.append(f"{module.path}:{line}: {own} imports {target} of {higher}")
    return findings


def import_cycles(modules: dict[str, Module]) -> list[str]:
    """Each cycle of modules once, as the chain that closes it."""
    findings, finished = [], set()

    def walk(name: str, chain: list[str]) -> None:
        if name in chain:
            cycle = chain[chain.index(name):] + [name]
            findings.append(f"{modules[name].path}:1: imports go in a circle: {' -> '.join(cycle)}")
        elif name not in finished:
            for target in dict.fromkeys(i.module for i in modules[name].imports):
                if target in modules:
                    walk(target, chain + [name])
            finished.add(name)

    for name in modules:
        walk(name, [])
    return findings


def check(root: Path) -> list[str]:
    modules = parse_tree(root)
    return upward_imports(modules) + import_cycles(modules)
