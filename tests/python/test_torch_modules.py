"""The module for the installed torch: which one is chosen, what is said where none fits, what the libraries need."""

import importlib.metadata
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import strata
from strata import torch_modules

SUFFIX = ".cpython-%d%d-x86_64-linux-gnu.so" % sys.version_info[:2]
PACKAGE = Path(strata.__file__).absolute().parent


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A package with modules for torch 2.11 and 2.13; returns a function that installs a torch of a version."""
    for minor in ("2.13", "2.11"):
        folder = tmp_path / "_torch" / f"t{minor.replace('.', '_')}"
        folder.mkdir(parents=True)
        (folder / f"_C{SUFFIX}").touch()
        (folder / "built_for.txt").write_text(f"{minor}.0+cu130\n")
    monkeypatch.setattr(torch_modules, "FOLDER", tmp_path / "_torch")
    monkeypatch.delenv(torch_modules.CHOICE, raising=False)

    def install(version):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    return install


@pytest.mark.parametrize("version, folder", [
    ("2.11.0", "t2_11"), ("2.11.1+cpu", "t2_11"), ("2.13.0+cu126", "t2_13"), ("2.13.2+rocm6.4", "t2_13"),
    ("2.13.0+cu130", "t2_13"),
])  # fmt: skip
def test_a_release_gets_the_module_of_its_minor_version(modules, version, folder):
    modules(version)
    assert torch_modules.choose(torch_modules.installed()).parent.name == folder
    assert list(torch_modules.built()) == ["2.11", "2.13"]
    assert torch_modules.requirement() == "torch>=2.11,<2.14"


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1", "2.14.0", "3.0.0"])
def test_another_minor_version_is_refused_with_the_remedies(modules, version):
    modules(version)
    with pytest.raises(torch_modules.WrongTorch, match=re.escape(
        f"this Strata was built for torch 2.11 to 2.13, and torch {version} is installed; run pip install "
        "'torch>=2.11,<2.14', or build Strata for it: pip install --no-build-isolation")):  # fmt: skip
        torch_modules.choose(torch_modules.installed())


def test_a_torch_that_no_installer_knows_is_found_by_its_folder(modules, monkeypatch, tmp_path):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    modules("2.13.0")
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("debug = False\n__version__ = '2.13.1+cpu'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_modules.installed() == "2.13.1+cpu"
    monkeypatch.setattr(sys, "path", [])
    assert torch_modules.installed() is None


@pytest.mark.parametrize("version", ["2.13.0a0+nv26.7", "2.13.0.dev20260601+cu130", "2.13.0rc1"])
def test_what_is_no_release_is_refused_unless_it_is_asked_for(modules, monkeypatch, version):
    modules(version)
    with pytest.raises(torch_modules.WrongTorch, match=r"is no release, .* STRATA_TORCH_MODULE=2\.13$"):
        torch_modules.choose(version)
    monkeypatch.setenv(torch_modules.CHOICE, "2.13")
    assert torch_modules.choose(version).parent.name == "t2_13"
    monkeypatch.setenv(torch_modules.CHOICE, "2.12")
    with pytest.raises(torch_modules.WrongTorch, match=r"STRATA_TORCH_MODULE is '2.12'; wanted one of 2.11, 2.13"):
        torch_modules.choose(version)


def test_a_package_built_for_a_nightly_serves_exactly_that_one(modules):
    nightly = "2.13.0a0+nv26.7"
    (torch_modules.FOLDER / "t2_13" / "built_for.txt").write_text(nightly)
    assert torch_modules.choose(nightly).parent.name == "t2_13"
    with pytest.raises(torch_modules.WrongTorch, match="is no release"):
        torch_modules.choose("2.13.0a0+nv26.8")


def test_modules_of_another_python_are_named(modules):
    for path in torch_modules.FOLDER.glob("t*/_C*"):
        path.rename(path.with_name("_C.cpython-39-x86_64-linux-gnu.so"))
    with pytest.raises(torch_modules.WrongTorch, match=r"was built for Python 3\.9, and this is Python 3\.\d+;"):
        torch_modules.choose("2.13.0")


def test_two_torches_are_told_apart(modules, monkeypatch):
    torch = types.SimpleNamespace(__version__="2.11.0+cpu", __file__="/a/torch/i.py")
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch_modules.require_same("2.11.0")
    with pytest.raises(torch_modules.WrongTorch, match=r"name torch 2\.13\.0, and 'import torch' brought 2\.11\.0\+cpu "
                                                       r"from /a/torch; remove one"):  # fmt: skip
        torch_modules.require_same("2.13.0")


@pytest.mark.parametrize("reason, remedy", [
    ("libstdc++.so.6: version `GLIBCXX_3.4.29' not found", "libstdc.*too old.*libstdcxx-ng"),
    ("libc.so.6: version `GLIBC_2.34' not found", "glibc is too old: wanted 2.34"),
    ("undefined symbol: _ZN2at", "may be damaged; run pip install --force-reinstall 'torch>=2.11,<2.14'"),
])  # fmt: skip
def test_a_module_that_cannot_be_loaded_says_what_is_wrong(modules, reason, remedy):
    assert re.search(remedy, str(torch_modules.explain(ImportError(reason), Path("_C.so"))))


def test_a_python_without_torch_is_told_before_anything_is_imported(tmp_path):
    """Names of the engine raise the sentence; what needs no engine still works."""
    script = "import strata, sys\nprint(strata.__version__)\nstrata.UsageError"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path = [{str(PACKAGE.parent)!r}] + "
                           f"[p for p in sys.path if 'site-packages' not in p]\n{script}"],
                          capture_output=True, text=True, env={"PATH": os.environ["PATH"]})  # fmt: skip
    assert done.returncode == 1 and done.stdout
    assert "WrongTorch: Strata needs torch beside it, and" in done.stderr and "run pip install 'torch>=" in done.stderr


# --- the libraries --------------------------------------------------------------------------------------------------


def _symbols(path, *options):
    """{name without its version: the version or ""} of the dynamic symbols that ``nm`` lists, but weak references."""
    listed = subprocess.run(["nm", "-D", *options, path], capture_output=True, text=True, check=True).stdout
    names = (line.split()[-1].replace("@@", "@").partition("@") for line in listed.splitlines() if " w " not in line)
    return {name: version for name, _, version in names}


def _libraries():
    return [*PACKAGE.glob("lib/libstrata_core-*.so"), torch_modules.choose(torch_modules.installed())]


def test_the_libraries_run_on_systems_of_manylinux_2_34():
    """glibc 2.34, and the libstdc++ of GCC 11, whose newest version is GLIBCXX_3.4.29."""
    newest = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
    for library in _libraries():
        for name, version in _symbols(library, "--undefined-only").items():
            kind, _, number = version.partition("_")
            if kind in newest and number[:1].isdigit():
                assert tuple(int(part) for part in number.split(".")) <= newest[kind], f"{library}: {name}@{version}"


def test_every_symbol_of_the_module_is_there_in_torch_or_the_core():
    import torch

    core, module = _libraries()
    given = set(_symbols(core, "--defined-only"))
    for library in Path(torch.__file__).parent.glob("lib/lib*.so"):
        if re.match(r"lib(c10|torch|torch_cpu|torch_python)\.so", library.name):
            given |= set(_symbols(library, "--defined-only"))
    wanted = _symbols(module, "--undefined-only")
    missing = [name for name, version in wanted.items() if not version and name not in given]
    assert not [name for name in missing if not re.match("_?Py", name)]


def test_the_core_shows_the_engines_names_alone():
    core, _ = _libraries()
    shown = subprocess.run(["nm", "-DC", "--defined-only", core], capture_output=True, text=True, check=True).stdout
    assert "strata::engine::Engine::" in shown
    assert not [line for line in shown.splitlines() if "strata::" not in line]
