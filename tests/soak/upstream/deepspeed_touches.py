"""Says of DeepSpeed's unit tests, from their sources alone, which ask for internals: the rule and its table are in
``deepspeed_internals.txt``.

    python tests/soak/upstream/deepspeed_touches.py DEEPSPEED

prints each test with its reason. A test touches the names in its body, in its decorators, and in the functions, classes
and fixtures of its file that it names. Helpers in other files, which many tests share, are not followed.
"""

import ast
import functools
import importlib
import re
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parent / "deepspeed_internals.txt"
_REPLACING = {"setattr", "delattr", "patch", "object"}  # monkeypatch.setattr, patch(), patch.object()


@functools.cache
def table():
    """{kind: [(pattern, why)]} of the lines of ``TABLE``."""
    kinds = {"feature": [], "file": [], "attribute": [], "torch": [], "text": []}
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, pattern, why = line.split(" ", 2)
            kinds[kind].append((pattern, why))
    return kinds


def area_of(path):
    """("feature" or "file", why) of a file below tests/unit that is not run; else None."""
    for kind in ("feature", "file"):
        for start, why in table()[kind]:
            if path.startswith(start):
                return kind, why
    return None


@functools.cache
def documented(checkout):
    """Names that DeepSpeed's reference documents, without "deepspeed."."""
    pages = (checkout / "docs" / "code-docs" / "source").glob("*.rst")
    text = "\n".join(page.read_text() for page in pages)
    if not text:
        raise SystemExit(f"{checkout} has no docs/code-docs/source/*.rst, which say which names are DeepSpeed's "
                         "interface: give a checkout with its docs")
    return {name.removeprefix("deepspeed.") for name in re.findall(r"\.\. auto\w+:: *([\w.]+)", text)}


@functools.cache
def stood_in():
    """Names that Strata has under DeepSpeed's name, offered or refused by a feature, without "deepspeed."."""
    names = importlib.import_module("strata.compat.names")
    return {f"{path}.{name}".removeprefix(".") for path, found in names.MODULES.items() for name in found}


def is_interface(name, checkout):
    """Whether ``name``, such as "deepspeed.zero.Init", or a part of it before a dot, is DeepSpeed's interface."""
    path = name.removeprefix("deepspeed").removeprefix(".")
    names = importlib.import_module("strata.compat.names")
    for alias, target in names.ALIASES.items():
        if path == alias or path.startswith(alias + "."):
            path = target + path[len(alias) :]
    if path in names.MODULES or path in _modules(checkout):
        return True  # a module alone: its names decide
    known = documented(checkout) | stood_in()
    parts = path.split(".")
    if any(part.startswith("_") and not part.startswith("__") for part in parts) and path not in stood_in():
        return False
    return any(".".join(parts[:count]) in known for count in range(1, len(parts) + 1))


@functools.cache
def _modules(checkout):
    """Modules of DeepSpeed's own, without "deepspeed."."""
    home = checkout / "deepspeed"
    files = (path.relative_to(home).with_suffix("") for path in home.rglob("*.py"))
    return {".".join(path.parts).removesuffix("__init__").removesuffix(".") for path in files}


class Source:
    """One file of tests.

    Args:
        path: Path of the file. checkout: Path of DeepSpeed.

    Attributes:
        absent: names of internals that the file imports.
    """

    def __init__(self, path, checkout):
        self._checkout = checkout
        text = path.read_text()
        self._lines = text.split("\n")
        self._tree = ast.parse(text)
        self._aliases = {}  # {name here: full name}
        self._found = {}  # {name: its definition}
        self.absent = set()
        for node in ast.walk(self._tree):
            self._note_import(node)
        for node in self._tree.body:
            self._note_definition(node)

    def _note_import(self, node):
        if isinstance(node, ast.Import):
            for entry in node.names:
                full = entry.name if entry.asname else entry.name.partition(".")[0]
                self._aliases[entry.asname or full] = full
        elif isinstance(node, ast.ImportFrom) and (node.module or node.level):
            home = f"unit.{node.module}" if node.level else node.module
            for entry in node.names:
                full = f"{home}.{entry.name}"
                self._aliases[entry.asname or entry.name] = full
                if full.startswith("deepspeed.") and not is_interface(full, self._checkout):
                    self.absent.add(full)

    def _note_definition(self, node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self._found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._found[target.id] = node

    def tests(self):
        """Yields ("Class::function" or "function", why it asks for internals or None)."""
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield node.name, self._why(node, None)
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                for method in self._methods(node).values():
                    if method.name.startswith("test"):
                        yield f"{node.name}::{method.name}", self._why(method, node)

    def _methods(self, cls):
        """{name: function} of a class, with those of its bases in this file."""
        methods = {}
        for base in cls.bases:
            found = self._found.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef):
                methods.update(self._methods(found))
        methods.update({node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)})
        return methods

    def _why(self, test, cls):
        methods = self._methods(cls) if cls is not None else {}
        waiting = [test, *(cls.decorator_list if cls is not None else ())]
        seen = set()
        while waiting:
            node = waiting.pop(0)
            if id(node) in seen:
                continue
            seen.add(id(node))
            why = self._touched(node)
            if why is not None:
                return why
            waiting += self._reached(node, methods)
        return None

    def _reached(self, node, methods):
        """The parts of this file that ``node`` names: functions, classes, fixtures, methods of its own class."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self._found:
                yield self._found[part.id]
            elif isinstance(part, ast.arg) and (part.arg in self._found or part.arg in methods):
                yield methods.get(part.arg, self._found.get(part.arg))
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                if part.attr in methods:
                    yield methods[part.attr]

    def _touched(self, node):
        text = "\n".join(self._lines[node.lineno - 1 : node.end_lineno])
        for pattern, why in table()["text"]:
            if re.search(pattern, text):
                return why
        own = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        for part in ast.walk(node):
            why = None
            if isinstance(part, (ast.Name, ast.Attribute)):
                why = self._named(part, own)
            elif isinstance(part, ast.Call):
                why = self._replaced(part)
            if why is not None:
                return why
        return None

    def _full(self, node):
        """"deepspeed.comm.barrier" for ``dist.barrier``; None for a name that does not begin with an import."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        above = self._full(node.value) if isinstance(node, ast.Attribute) else None
        return above and f"{above}.{node.attr}"

    def _named(self, node, own):
        """Args: own: names of variables of the function, which are no imports."""
        first = node
        while isinstance(first, ast.Attribute):
            first = first.value
        full = None if isinstance(first, ast.Name) and first.id in own else self._full(node)
        if full is not None and full.partition(".")[0] == "deepspeed":
            return None if is_interface(full, self._checkout) else f"the name {full}"
        if not isinstance(node, ast.Attribute):
            return None
        for name, why in table()["attribute"]:
            if node.attr == name:
                return f"{name}: {why}"
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if is_own or not is_private or full is not None or node.attr in dict(table()["torch"]):
            return None
        return f"the private attribute {node.attr}"

    def _replaced(self, call):
        """The reason, if ``call`` is monkeypatch.setattr() or mock.patch() on a part of DeepSpeed; None otherwise."""
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        if name not in _REPLACING or not call.args:
            return None
        first = call.args[0]
        text = first.value if isinstance(first, ast.Constant) else self._full(first)
        if isinstance(text, str) and text.startswith("deepspeed"):
            return f"replaces {text}"
        if isinstance(first, ast.Name) and first.id in ("engine", "optimizer", "model", "accel"):
            return f"replaces a function of the {first.id}"
        return None


def classify(checkout):
    """Yields (file below tests/unit, its area or None, {test: why or None}, names of internals that it imports); the
    last two are empty where there is an area."""
    unit = checkout / "tests" / "unit"
    for path in sorted(unit.rglob("test_*.py")):
        short = str(path.relative_to(unit))
        area = area_of(short)
        if area is not None:
            yield short, area, {}, set()
        else:
            source = Source(path, checkout)
            yield short, None, dict(source.tests()), source.absent


def main():
    for file, area, tests, _ in classify(Path(sys.argv[1]).resolve()):
        if area:
            print(f"not run: {file}: {area[1]}")
        for test, why in tests.items():
            print(f"internals: {file}::{test}: {why}" if why else f"counted: {file}::{test}")


if __name__ == "__main__":
    main()
