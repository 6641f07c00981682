"""Finds the classes and functions of a C++ file by their braces, without a compiler.

The search is simple on purpose: at namespace and class scope, a brace behind a closing parenthesis
opens a function, one behind `class` or `struct` and a name opens a class, and all others open
scopes without a name. What stands within a function is not looked at.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
MARK = re.compile(r"[{};]")
SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()=]*$")
FUNCTION = re.compile(r"\)(\s*(const|noexcept|override|final|try|&|->[^;{}]*|:[^;]*))*\s*$")
MORE_INITIALIZERS = re.compile(r"\s*[,{]")  # what follows the brace of `member_{1}` in a constructor
DEFAULTED = re.compile(r"=\s*default\s*$")
NAMESPACE = re.compile(r"\bnamespace\b\s*([\w:]*)\s*$")
CLASS = re.compile(r"(?<!enum )\b(?:class|struct|union)\s+(?:alignas\([^)]*\)\s*|\[\[[^\]]*\]\]\s*)*"
                   r"((?:\w+::)*\w+)(?:\s+final)?\s*(?::[^:]|$)")
OPERATOR = re.compile(r"\boperator\s*(?:\(\)|[^\w\s(]+|[\w:\s*&<>]+?)(?=\s*\()")
ANGLES = re.compile(r"<[^<>]*>")
DECLARATOR = re.compile(r"((?:\w+\s*::\s*)*~?\w+)\s*$")


class Definition(NamedTuple):
    """One class or function: where it stands, its name as it is written there, and its lines."""

    kind: str  # "class" or "function"
    scopes: tuple[str, ...]  # the namespaces and classes around it; "" is an anonymous namespace
    name: str
    first: int
    lines: int


def blank_out(match: re.Match[str]) -> str:
    """Comments and literals become blanks of as many lines, so that line numbers stay; digit
    separators (1'000) are told from characters by what stands before them."""
    text = match[0]
    if text[0] == "'" and match.start() and match.string[match.start() - 1].isalnum():
        return text
    return " " + "\n" * text.count("\n")


def without_templates(head: str) -> str:
    """The head of a definition without what stands between angle brackets."""
    head, shorter = OPERATOR.sub("operator_", head), None
    while shorter != head:
        head, shorter = ANGLES.sub("", head), head
    return head


def function_name(head: str) -> str:
    """`Foo::bar` of `std::vector<int> Foo::bar(int x) const`."""
    match = DECLARATOR.search(without_templates(head).partition("(")[0])
    return re.sub(r"\s", "", match[1]) if match else ""


def opened_scope(head: str) -> tuple[str, str]:
    """(kind, name) of the scope that a brace behind `head` opens."""
    if match := NAMESPACE.search(head):
        return "namespace", match[1]
    if SCOPE.search(head) and (match := CLASS.search(without_templates(head))):
        return "class", match[1]
    return "other", ""


def definitions(text: str) -> list[Definition]:
    """All classes, and all functions that have a body or are defaulted, in the order of their ends."""
    code = DIRECTIVE.sub(lambda match: "\n" * match[0].count("\n"), NOT_CODE.sub(blank_out, text))
    found: list[Definition] = []
    stack: list[tuple[str, str, int]] = []  # kind, name and first line of the scopes around
    start = 0  # of the head: what stands between the last mark and this one
    depth = 0  # of braces within a function
    line, counted = 1, 0
    first = 1

    def scopes() -> tuple[str, ...]:
        return tuple(name for kind, name, _ in stack if kind != "other")

    for mark in MARK.finditer(code):
        position = mark.start()
        line += code.count("\n", counted, position)
        counted = position
        if depth:
            depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
            if depth or MORE_INITIALIZERS.match(code, position + 1):
                continue  # still within the function, or a member's initializer has ended
            name = function_name(code[start:position])
            found.append(Definition("function", scopes(), name, first, line - first + 1))
            start = position + 1
            continue
        head = code[start:position]
        first = line - head.lstrip().count("\n")
        if mark[0] == "{" and FUNCTION.search(head) and not SCOPE.search(head):
            depth = 1
            continue
        if mark[0] == "{":
            stack.append((*opened_scope(head), first))
        elif mark[0] == "}" and stack:
            kind, name, opened = stack.pop()
            if kind == "class":
                found.append(Definition("class", scopes(), name, opened, line - opened + 1))
        elif DEFAULTED.search(head):
            found.append(Definition("function", scopes(), function_name(head), first, line - first + 1))
        start = position + 1
    return found
