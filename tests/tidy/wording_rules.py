"""Rules about sentences: forms of English that make readers stop are counted, and their number may only fall.

A sentence names its actor: "The reader opens the file", not "What is read is opened by whoever wants it". Each form
has a number of places that are left. More of them are a finding; so are fewer, until the number here is lowered.
"""

from __future__ import annotations

import re
from pathlib import Path

import text_rules

FOLDERS = ("src", "python", "tests", "bench", "examples", "tools", "fuzz")
SUFFIXES = {".h", ".cpp", ".cu", ".py", ".sh"}
# A sentence begins after a full stop, or where a comment, a docstring or a string begins.
BEGINNING = r"(?:^|[.:;!?]\s+|(?://+|#|\*|\"+)\s*)"
FORMS = {
    "nobody, whoever, somebody": re.compile(r"\b(?:nobody|whoever|somebody|anybody)\b", re.IGNORECASE),
    "a sentence that opens with What or Who": re.compile(BEGINNING + r"(?:What|Who)\s(?!(?:is|are|do|does)\b[^.]*\?)",
                                                         re.MULTILINE),
    "a sentence that opens with Of": re.compile(BEGINNING + r"Of\s", re.MULTILINE),
    "as it is, as they are": re.compile(r"\bas (?:it is|they are)\b"),
    "so many": re.compile(r"\bso many\b", re.IGNORECASE),
}
LEFT = dict.fromkeys(FORMS, 0)  # places of each form that are left to be written anew


def listed_texts(root: Path) -> list[Path]:
    code = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts]
    pages = sorted((root / "bench").rglob("*.md"))
    return [path for path in (*code, *pages, *text_rules.documents(root)) if "tidy" not in path.parts]


def places(root: Path) -> dict[str, list[str]]:
    """By form, "file:line" of each place."""
    found: dict[str, list[str]] = {form: [] for form in FORMS}
    for path in listed_texts(root):
        text = path.read_text(encoding="utf-8")
        for form, pattern in FORMS.items():
            found[form] += [f"{path.relative_to(root).as_posix()}:{text.count(chr(10), 0, match.end()) + 1}"
                            for match in pattern.finditer(text)]
    return found


def check(root: Path, left: dict[str, int] = LEFT) -> list[str]:
    findings = []
    for form, where in places(root).items():
        if len(where) > left[form]:
            findings.append(f"{len(where)} places have '{form}'; the most is {left[form]}: name the actor, and write "
                            f"subject, verb, object. `python3 tests/tidy/wording_rules.py` lists the places")
        elif len(where) < left[form]:
            findings.append(f"tests/tidy/wording_rules.py:1: '{form}' is left in {len(where)} places: lower its number")
    return findings


if __name__ == "__main__":
    for name, all_places in places(Path(__file__).resolve().parents[2]).items():
        print(f"{name}: {len(all_places)}")
        print("".join(f"  {place}\n" for place in all_places), end="")
