"""Shows that a change touches comments, docstrings and documents alone: code without them is the same.

    python3 tools/comments_only.py [BASE [CHANGE]]

Compares the working tree, or the commit CHANGE, with BASE (HEAD). Prints the files whose code differs; the exit status
is 1 where there are any. C++ is compared without comments and white space, and with adjacent string literals joined,
since a longer line may break them elsewhere; Python by its syntax tree without docstrings; shell by its lines.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

CPP = {".h", ".cpp", ".cu", ".cuh"}
DOCUMENTS = {".md", ".svg"}
# Keeps strings, raw strings and characters, and drops comments.
CPP_TOKENS = re.compile(r'R"(?P<raw>[^(\s]*)\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
                        r"|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<space>\s+)", re.DOTALL)


def cpp_code(text: str) -> str:
    lines = re.sub(r"^\s*(#[^\n]*)", r"\n\1\n", text, flags=re.MULTILINE)
    bare = CPP_TOKENS.sub(lambda m: " " if m["comment"] or m["space"] else m[0], lines)
    return re.sub(r"\s+", " ", re.sub(r'"\s+"', "", bare))


def python_code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
    return ast.dump(tree)


def code_of(name: str, text: str) -> str:
    suffix = Path(name).suffix
    if suffix in CPP:
        return cpp_code(text)
    if suffix == ".py":
        return python_code(text)
    if suffix in DOCUMENTS:
        return ""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def text_of(name: str, commit: str | None) -> str:
    """The file's text; empty if there is no such file."""
    try:
        return git("show", f"{commit}:{name}") if commit else Path(name).read_text(encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> int:
    base, change = (*sys.argv[1:], *("HEAD", None)[len(sys.argv) - 1:])[:2]
    names = git("diff", "--name-only", base, *([change] if change else [])).split()
    changed = [name for name in names if code_of(name, text_of(name, base)) != code_of(name, text_of(name, change))]
    print("\n".join(f"{name}: more than comments changed" for name in changed)
          or f"{len(names)} files: nothing but comments, docstrings and documents changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
