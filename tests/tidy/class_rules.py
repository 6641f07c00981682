"""Rules about classes: one of C++ has one .cpp, and its header and .cpp are not long together; no body of a class of
Python is long.

A class is known by its namespaces and its name; classes within it are part of it. An anonymous
namespace is one of its file. The lines of a class are those of the files that hold its body and its
functions, less what other classes have there.
"""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import cpp_scopes
from file_rules import listed_files

FOLDERS = ("src", "python")
MAX_CLASS_LINES = 400


class Part(NamedTuple):
    """The body of a class, or a function of it that is defined outside."""

    path: str
    first: int
    lines: int


def is_class_name(word: str) -> bool:
    """Types begin with a capital letter and namespaces do not (docs/STYLE.md); A_MACRO is neither."""
    return word[:1].isupper() and not (word.isupper() and "_" in word)


def class_key(path: str, found: cpp_scopes.Definition) -> str:
    """`strata::io::File` for the class, the classes within it and its functions; "" for all else."""
    words = list(found.scopes)
    if found.kind == "class":
        words.append(found.name)
    elif "::" in found.name:
        words.append(found.name.rpartition("::")[0])
    words = "::".join(word or f"<{path}>" for word in words).split("::")
    for place, word in enumerate(words):
        if is_class_name(word):
            return "::".join(words[:place + 1])
    return ""


def class_parts(path: str, text: str) -> dict[str, list[Part]]:
    """The parts of each class that stand in one file; a part within another is not counted twice."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for found in cpp_scopes.definitions(text):
        key = class_key(path, found)
        is_within = any(is_class_name(scope) for scope in found.scopes)
        if key and not is_within:
            parts[key].append(Part(path, found.first, found.lines))
    return parts


def spread_classes(classes: dict[str, list[Part]]) -> list[str]:
    findings = []
    for key, parts in classes.items():
        sources = sorted({part.path for part in parts if part.path.endswith(".cpp")})
        for other in sources[1:]:
            first = min(part.first for part in parts if part.path == other)
            findings.append(f"{other}:{first}: {key.rpartition('::')[2]} has functions here and in "
                            f"{sources[0]}; a class has one .cpp")
    return findings


def long_classes(classes: dict[str, list[Part]], file_lines: dict[str, int]) -> list[str]:
    of_classes = dict.fromkeys(file_lines, 0)  # how many lines of each file belong to any class
    for part in itertools.chain.from_iterable(classes.values()):
        of_classes[part.path] += part.lines
    findings = []
    for key, parts in classes.items():
        own = sum(part.lines for part in parts)
        lines = own + sum(file_lines[path] - of_classes[path] for path in {part.path for part in parts})
        if lines > MAX_CLASS_LINES:
            findings.append(f"{parts[0].path}:{parts[0].first}: {key.rpartition('::')[2]} has {lines} "
                            f"lines in its files; the most is {MAX_CLASS_LINES}")
    return findings


def long_python_classes(name: str, text: str) -> list[str]:
    found = [(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
             for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [f"{name}:{first}: {word} has {lines} lines; the most is {MAX_CLASS_LINES}"
            for word, first, lines in found if lines > MAX_CLASS_LINES]


def check(root: Path) -> list[str]:
    findings = []
    classes: dict[str, list[Part]] = defaultdict(list)
    file_lines = {}
    for path in listed_files(root, FOLDERS):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            findings += long_python_classes(name, text)
        if path.suffix not in (".h", ".cpp"):
            continue
        file_lines[name] = text.count("\n")
        for key, parts in class_parts(name, text).items():
            classes[key] += parts
    for parts in classes.values():
        parts.sort(key=lambda part: (part.path.endswith(".cpp"), part.path, part.first))
    return findings + spread_classes(classes) + long_classes(classes, file_lines)
