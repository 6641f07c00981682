"""docs/reference: the pages are those that `make reference` would write, and every public name is on one."""

import importlib.util
import pkgutil
from pathlib import Path

import pytest
import strata

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def written():
    """{path: text} of `make reference`."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_the_pages_are_current(written):
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run `make reference`"


def names_of(path):
    """The names of a module's ``__all__`` that are no modules."""
    module = pkgutil.resolve_name(path)
    found = {name: getattr(module, name) for name in module.__all__}
    return [name for name, value in found.items() if callable(value)]


@pytest.mark.parametrize("path", ["strata", "strata.zero", "strata.nn", "strata.tiles", "strata.utils"])
def test_every_public_name_has_an_entry(path):
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    missing = [name for name in names_of(path) if f"### {name}\n" not in page and f"| `{name}` |" not in page]
    assert missing == []


def test_every_method_of_the_engine_has_an_entry():
    page = (ROOT / "docs/reference/engine.md").read_text(encoding="utf-8")
    own = {name for cls in strata.Engine.__mro__ if cls.__module__.startswith("strata") for name in vars(cls)}
    public = [name for name in sorted(own) if not name.startswith("_")]
    assert len(public) > 150
    missing = [name for name in public if not any(mark in page for mark in (
        f"### {name}\n", f"| `{name}` |", f"| `{name}(", f"- `{name}`:", f", {name}`:", f"`{name}, "))]
    assert missing == []


def test_the_example_in_cpp_includes_public_headers_alone():
    page = (ROOT / "docs/reference/cpp.md").read_text(encoding="utf-8")
    for source in (ROOT / "examples/cpp").glob("*.*"):
        for line in source.read_text(encoding="utf-8").splitlines():
            if line.startswith('#include "strata/'):
                assert line in page, f"{source.name}: {line} is not among HEADERS of tools/reference.py"
