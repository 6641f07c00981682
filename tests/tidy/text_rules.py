"""Rules about documents: a paragraph is short enough to be read at once, and so are pages that everybody reads.

Each item of a list is a paragraph of its own. Tables, code, pictures and headings are none.
"""

from __future__ import annotations

import re
from pathlib import Path

MAX_PARAGRAPH_WORDS = 120
MAX_PAGE_LINES = {"README.md": 120, "docs/ARCHITECTURE.md": 200, "docs/BENCHMARKS.md": 150}
FENCE = re.compile(r"\s*(```|~~~)")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s")
NO_TEXT = re.compile(r"\s*(#|\||<|$)")  # a heading, a row of a table, a tag, an empty line


def documents(root: Path) -> list[Path]:
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")),
             *sorted((root / "bench").glob("*.md"))]
    return [page for page in pages if page.is_file()]


def paragraphs(text: str) -> list[tuple[int, int]]:
    """(first line, number of words) of each paragraph."""
    found: list[tuple[int, int]] = []
    is_code = is_open = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_code, is_open = not is_code, False
        elif is_code or NO_TEXT.match(line):
            is_open = False
        elif is_open and not LIST_ITEM.match(line):
            found[-1] = (found[-1][0], found[-1][1] + len(line.split()))
        else:
            found.append((number, len(line.split())))
            is_open = True
    return found


def check(root: Path) -> list[str]:
    findings = []
    for page in documents(root):
        name, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        lines, most = text.count("\n"), MAX_PAGE_LINES.get(name)
        if most is not None and lines > most:
            findings.append(f"{name}:1: this page has {lines} lines; the most is {most}")
        findings += [f"{name}:{first}: this paragraph has {words} words; the most is "
                     f"{MAX_PARAGRAPH_WORDS}"
                     for first, words in paragraphs(text)
                     if words > MAX_PARAGRAPH_WORDS]
    return findings
