"""Rules about single files: their size and name, their functions, how they open, words left behind.

The limits are those of docs/STYLE.md. Functions are found by cpp_scopes.py and, in Python, by the
parser of Python itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cpp_scopes

FOLDERS = ("src", "python", "cli", "tests", "fuzz", "bench", "examples", "tools")
SUFFIXES = {".h", ".cpp", ".py", ".sh"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
PRODUCT = ("src", "python")  # its size may fall, and rise only with these numbers
MAX_PRODUCT_LINES = 73_060
MAX_PRODUCT_FILES = 423
MAX_PYTHON_COLUMNS = 120  # of C++ clang-format sees to it
MIN_HEADER_PARAGRAPH = 45  # characters: less is a title, not a description
BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
# What scripts import by these names; they hold no code of their own.
PUBLIC_NAMES = {"python/strata/utils/__init__.py", "python/strata/utils/zero_to_fp32.py"}
ERRNO_TEXT = "src/strata/base/error.h"
STRERROR = re.compile(r"\bstrerror(_r)?\s*\(")
BANNED_WORDS = re.compile("|".join((r"\bTO" r"DO\b", r"\bFIX" r"ME\b", r"\bX" r"XX\b", r"\bHA" r"CK\b",
                                    r"\bfor " r"now\b")))


def listed_files(root: Path, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return [path for folder in folders for path in sorted((root / folder).rglob("*"))
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts]


def cpp_functions(text: str) -> list[tuple[int, int]]:
    """(first line, number of lines) of each function, declaration to closing brace."""
    return [(found.first, found.lines) for found in cpp_scopes.definitions(text)
            if found.kind == "function"]


def python_functions(text: str) -> list[tuple[int, int]]:
    return [(node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def long_files_and_functions(name: str, text: str) -> list[str]:
    findings = []
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        findings.append(f"{name}:1: has {lines} lines; the most is {MAX_FILE_LINES}")
    functions = {".py": python_functions, ".h": cpp_functions, ".cpp": cpp_functions}
    for first, length in functions.get(Path(name).suffix, lambda _: [])(text):
        if length > MAX_FUNCTION_LINES:
            findings.append(f"{name}:{first}: this function has {length} lines; the most is "
                            f"{MAX_FUNCTION_LINES}")
    return findings


def missing_paragraph(name: str, text: str) -> list[str]:
    """A header opens with a comment that describes it, a Python module with its docstring."""
    if name.endswith(".h"):
        comment = re.match(r"(?://[^\n]*\n)*", text)
        if comment is None or len(comment[0]) < MIN_HEADER_PARAGRAPH:
            return [f"{name}:1: a header opens with a paragraph: role, threads, ownership, units, "
                    "errors"]
    elif name.endswith(".py") and text.strip() and ast.get_docstring(ast.parse(text)) is None:
        return [f"{name}:1: a module opens with a docstring that says what it is for"]
    return []


def long_lines(name: str, text: str) -> list[str]:
    if not name.endswith(".py"):
        return []
    return [f"{name}:{number}: this line has {len(line)} columns; the most is {MAX_PYTHON_COLUMNS}"
            for number, line in enumerate(text.splitlines(), 1) if len(line) > MAX_PYTHON_COLUMNS]


def banned_words(name: str, text: str) -> list[str]:
    return [f"{name}:{number}: '{match[0]}' is not left in the tree: do it, or write down why not"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := BANNED_WORDS.search(line))]


def own_words_for_errno(name: str, text: str) -> list[str]:
    """strerror() is not safe in threads, and every message has errno in one form."""
    if not name.endswith((".h", ".cpp")):
        return []
    return [f"{name}:{number}: strerror: write errno_text(), of {ERRNO_TEXT}"
            for number, line in enumerate(text.splitlines(), 1) if STRERROR.search(line)]


def banned_name(name: str) -> list[str]:
    if name in PUBLIC_NAMES:
        return []
    words = {word.lower() for part in Path(name).parts for word in re.split(r"[_.\-]", part)}
    return [f"{name}:1: '{word}' says nothing in a file's name: name it after its one noun"
            for word in sorted(words & BANNED_NAMES)]


def large_product(root: Path, most_lines: int = MAX_PRODUCT_LINES, most_files: int = MAX_PRODUCT_FILES) -> list[str]:
    files = listed_files(root, PRODUCT)
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    counts = ((lines, most_lines, "lines"), (len(files), most_files, "files"))
    return [f"src, python: {found:,} {unit} of product code; the most is {most:,}"
            for found, most, unit in counts if found > most]


def check(root: Path) -> list[str]:
    findings = large_product(root)
    for path in listed_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        findings += long_files_and_functions(name, text) + missing_paragraph(name, text)
        findings += long_lines(name, text) + banned_words(name, text) + banned_name(name)
        findings += own_words_for_errno(name, text)
    return findings
