"""Rules about single files: their size and name, their functions, how they open, words left behind.

The limits are those of docs/STYLE.md. Functions are found by their braces and, in Python, by the
parser of Python itself; the search for C++ functions is simple on purpose: it looks at namespace and
class scope for a closing parenthesis before an opening brace.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDERS = ("src", "python", "cli", "tests", "fuzz", "bench", "examples", "tools")
SUFFIXES = {".h", ".cpp", ".py", ".sh"}
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 70
MIN_HEADER_PARAGRAPH = 45  # characters: less is a title, not a description
BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
BANNED_WORDS = re.compile("|".join((r"\bTO" r"DO\b", r"\bFIX" r"ME\b", r"\bX" r"XX\b", r"\bHA" r"CK\b",
                                    r"\bfor " r"now\b")))
NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
SCOPE = re.compile(r'\b(namespace|class|struct|union|enum|extern)\b[^()=]*$')
FUNCTION = re.compile(r"\)(\s*(const|noexcept|override|final|try|&|->[^;{}]*|:[^;]*))*\s*$")
MORE_INITIALIZERS = re.compile(r"\s*[,{]")  # what follows the brace of `member_{1}` in a constructor


def listed_files(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts]


def blank_out(match: re.Match[str]) -> str:
    """Comments and literals become blanks of as many lines, so that line numbers stay; digit
    separators (1'000) are told from characters by what stands before them."""
    text = match[0]
    if text[0] == "'" and match.start() and match.string[match.start() - 1].isalnum():
        return text
    return " " + "\n" * text.count("\n")


def cpp_functions(text: str) -> list[tuple[int, int]]:
    """(first line, number of lines) of each function body's declaration to its closing brace."""
    code = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", lambda m: "\n" * m[0].count("\n"),
                  NOT_CODE.sub(blank_out, text), flags=re.MULTILINE)
    found: list[tuple[int, int]] = []
    stack: list[int | None] = []  # the first line for a function, None for another scope
    head, line, head_line, nested = "", 1, 1, 0
    for position, character in enumerate(code):
        if character == "\n":
            line += 1
        if nested:
            nested += (character == "{") - (character == "}")
            if nested == 0:
                first = stack.pop() or line
                if MORE_INITIALIZERS.match(code, position + 1):
                    continue
                found.append((first, line))
                head = ""
            continue
        if character == "{":
            if SCOPE.search(head) or not FUNCTION.search(head):
                stack.append(None)
                head = ""
            else:
                stack.append(head_line)
                nested = 1
        elif character == "}":
            if stack:
                stack.pop()
            head = ""
        elif character == ";":
            head = ""
        else:
            if not head.strip():
                head, head_line = "", line
            head += character
    return [(first, last - first + 1) for first, last in found]


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


def banned_words(name: str, text: str) -> list[str]:
    return [f"{name}:{number}: '{match[0]}' is not left in the tree: do it, or write down why not"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := BANNED_WORDS.search(line))]


def banned_name(name: str) -> list[str]:
    words = {word.lower() for part in Path(name).parts for word in re.split(r"[_.\-]", part)}
    return [f"{name}:1: '{word}' says nothing in a file's name: name it after its one noun"
            for word in sorted(words & BANNED_NAMES)]


def check(root: Path) -> list[str]:
    findings = []
    for path in listed_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        findings += long_files_and_functions(name, text) + missing_paragraph(name, text)
        findings += banned_words(name, text) + banned_name(name)
    return findings
