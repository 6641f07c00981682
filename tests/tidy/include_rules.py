"""Rules about includes: layers and the rooms of a layer only look down, nothing goes in circles, torch
and Python stay above.

A file's layer is the first folder below src/strata, or "python" for python/; its room is the next
folder. The tables below are those of docs/ARCHITECTURE.md, lowest first. Each function takes the
parsed tree and returns its findings as text, one a violation, with the file and line where it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

LAYERS = ("base", "memory", "plan", "kernels", "io", "format", "device", "checkpoint", "comm", "offload", "engine",
          "forecast", "cli", "torch", "python")
# The rooms of the layers that have some; "" are the files in the layer's own folder.
ROOMS = {
    "comm": ("", "host", "peer", "combined"),
    "engine": ("schedule", "config", "unit", "record", "gather", "reduce", "optimize", "", "checkpoint"),
    "torch": ("base", "ranks", "model", "start", "sharded", "cpp", ""),
}
CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".inl"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH_HEADERS = re.compile(r"^(torch|ATen|c10|caffe2|gloo|nccl)(/|\.h)")
PYTHON_HEADERS = re.compile(
    r"^(Python\.h|pybind11/|nanobind/|torch/(extension|python)\.h|torch/csrc/(THP|python_|Exceptions"
    r"|utils/(pybind|python_|object_ptr)|autograd/python_|jit/python/))")


class Include(NamedTuple):
    """One #include line; target is what stands between the quotes or brackets."""

    line: int
    target: str


class SourceFile(NamedTuple):
    """A C++ file: its path from the root, its layer ("" when it has none) and its includes."""

    path: str
    layer: str
    includes: tuple[Include, ...]


def layer_of(path: str) -> str:
    parts = Path(path).parts
    if parts[:1] == ("python",):
        return "python"
    if parts[:2] == ("src", "strata") and len(parts) > 3:
        return parts[2]
    return ""


def room_of(path: str) -> str:
    parts = Path(path).parts
    return parts[3] if layer_of(path) in ROOMS and len(parts) > 4 else ""


def parse_tree(root: Path) -> dict[str, SourceFile]:
    """All C++ files of src/strata and python, by their path from the root."""
    files = {}
    for folder in ("src/strata", "python"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in CPP_SUFFIXES:
                continue
            name = path.relative_to(root).as_posix()
            lines = path.read_text(encoding="utf-8").splitlines()
            includes = tuple(Include(number, match[2]) for number, line in enumerate(lines, 1)
                             if (match := INCLUDE.match(line)))
            files[name] = SourceFile(name, layer_of(name), includes)
    return files


def resolve(file: SourceFile, target: str, files: dict[str, SourceFile]) -> str | None:
    """The path of one of our files that an include means, or None for a foreign header."""
    for candidate in ("src/" + target, str(Path(file.path).parent / target), "python/" + target):
        if candidate in files:
            return candidate
    return "src/" + target if target.startswith("strata/") else None


def misplaced_files(files: dict[str, SourceFile]) -> list[str]:
    findings = []
    for file in files.values():
        if file.layer not in LAYERS:
            findings.append(f"{file.path}:1: is in no layer; the layers are {', '.join(LAYERS)}")
        elif file.layer in ROOMS and room_of(file.path) not in ROOMS[file.layer]:
            rooms = ", ".join(room for room in ROOMS[file.layer] if room)
            findings.append(f"{file.path}:1: is in no room of {file.layer}; its rooms are {rooms}")
    return findings


def upward_includes(files: dict[str, SourceFile]) -> list[str]:
    """Files and targets that are misplaced are left to misplaced_files."""
    findings = []
    for file in files.values():
        for include in file.includes:
            target = resolve(file, include.target, files)
            if target is None:
                continue
            where = f"{file.path}:{include.line}: "
            layer, room = layer_of(target), room_of(target)
            if target not in files:
                findings.append(f"{where}includes {include.target}, which is not there")
            elif file.layer not in LAYERS or layer not in LAYERS:
                continue
            elif LAYERS.index(layer) > LAYERS.index(file.layer):
                findings.append(f"{where}layer {file.layer} includes {include.target} of the higher "
                                f"layer {layer}")
            elif layer == file.layer and is_higher_room(layer, room, room_of(file.path)):
                findings.append(f"{where}room {room_of(file.path) or 'root'} of {layer} includes "
                                f"{include.target} of the higher room {room or 'root'}")
    return findings


def is_higher_room(layer: str, room: str, than: str) -> bool:
    rooms = ROOMS.get(layer, ())
    return room in rooms and than in rooms and rooms.index(room) > rooms.index(than)


def include_cycles(files: dict[str, SourceFile]) -> list[str]:
    """Each cycle of files once, as the chain that closes it."""
    edges = {name: [target for include in file.includes
                    if (target := resolve(file, include.target, files)) in files]
             for name, file in files.items()}
    findings, finished = [], set()

    def walk(name: str, chain: list[str]) -> None:
        if name in chain:
            cycle = chain[chain.index(name):] + [name]
            findings.append(f"{name}:1: includes go in a circle: {' -> '.join(cycle)}")
        elif name not in finished:
            for target in edges[name]:
                walk(target, chain + [name])
            finished.add(name)

    for name in edges:
        walk(name, [])
    return findings


def foreign_headers(files: dict[str, SourceFile]) -> list[str]:
    """torch below the torch layer, and Python anywhere under src/strata."""
    findings = []
    for file in files.values():
        for include in file.includes:
            where = f"{file.path}:{include.line}: "
            if TORCH_HEADERS.match(include.target) and file.layer not in ("torch", "python"):
                findings.append(f"{where}layer {file.layer} includes {include.target}; only torch "
                                "and python may include torch")
            if PYTHON_HEADERS.match(include.target) and file.layer != "python":
                findings.append(f"{where}layer {file.layer} includes {include.target}; only python "
                                "may include Python's headers")
    return findings


def check(root: Path) -> list[str]:
    files = parse_tree(root)
    return (misplaced_files(files) + upward_includes(files) + include_cycles(files)
            + foreign_headers(files))
