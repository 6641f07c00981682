"""The extension modules in this package: one for each minor version of torch, and which of them this process needs.

torch's C++ interface changes between minor versions, also where no name changes. A module that was built for another
minor would overwrite memory, so it is never loaded. This module imports neither torch nor the engine.

A folder ``_torch/t2_13`` holds the modules for torch 2.13, one for each Python, and ``built_for.txt`` the whole version
of the torch whose headers they were compiled with. The idea is that of NIXL and moodist, whose wheels do the same."""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("_torch")
CHOICE = "STRATA_TORCH_MODULE"  # environment variable: the minor version whose module is loaded in any case
_INSTALL = "run pip install '{}'"
_BUILD = "build Strata for it: pip install --no-build-isolation --no-binary strata-train strata-train"


class WrongTorch(ImportError):
    """No module of this package fits the installed torch. The message says why, and the remedy."""


def built():
    """{minor version of torch, such as "2.13": the path of its module for this Python}, the oldest first."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    found = {path.parent.name[1:].replace("_", "."): path for path in FOLDER.glob(f"t*/_C{suffix}")}
    return dict(sorted(found.items(), key=lambda item: _numbers(item[0])))


def requirement():
    """The versions of torch that the modules of this package serve, as pip takes them: "torch>=2.11,<2.16"."""
    minors = list(built())
    major, minor = _numbers(minors[-1])
    return f"torch>={minors[0]},<{major}.{minor + 1}"


def installed():
    """The version of the torch that ``import torch`` brings, such as "2.13.0+cpu". None where there is none."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec("torch")  # a folder that no installer has put there
        version = spec and spec.origin and Path(spec.origin).with_name("version.py")
        if not version or not version.is_file():
            return None
        said = re.search(r"^__version__ = '(.*)'", version.read_text(), re.MULTILINE)
        return said and said[1]


def choose(version):
    """The path of the module for torch ``version``. WrongTorch where this package has none."""
    modules = built()
    if not modules:
        raise WrongTorch(_no_module())
    if chosen := os.environ.get(CHOICE):
        if chosen not in modules:
            raise WrongTorch(f"{CHOICE} is '{chosen}'; wanted one of {', '.join(modules)}")
        return modules[chosen]
    if version is None:
        raise WrongTorch(f"Strata needs torch beside it, and {sys.executable} finds none; "
                         f"{_INSTALL.format(requirement())}")  # fmt: skip
    module = modules.get(".".join(version.split(".")[:2]))
    if module is None:
        minors = list(modules)
        served = " to ".join(dict.fromkeys((minors[0], minors[-1])))
        raise WrongTorch(f"this Strata was built for torch {served}, and torch {version} is installed; "
                         f"{_INSTALL.format(requirement())}, or {_BUILD}")  # fmt: skip
    built_for = module.with_name("built_for.txt").read_text().strip()
    if version != built_for and not re.fullmatch(r"\d+\.\d+\.\d+(\+[\w.]+)?", version):
        raise WrongTorch(
            f"torch {version} is no release, so it may differ from the torch {built_for} that this Strata was built "
            f"for; {_BUILD}, or load that module at your own risk: {CHOICE}={'.'.join(version.split('.')[:2])}")
    return module


def require_same(version):
    """WrongTorch where the imported torch is not of ``version``, by which its module was chosen."""
    torch = sys.modules["torch"]
    if str(torch.__version__).split("+")[0] != version.split("+")[0]:
        raise WrongTorch(
            f"this Python has two torches: its packages name torch {version}, and 'import torch' brought "
            f"{torch.__version__} from {os.path.dirname(torch.__file__)}; remove one, or see what PYTHONPATH names")


def explain(error, path):
    """WrongTorch for an ImportError that the module at ``path`` raised when it was loaded."""
    reason = str(error)
    if "GLIBCXX" in reason or "CXXABI" in reason:
        remedy = ("the libstdc++.so.6 of this process is too old. In a conda environment run "
                  "conda install 'libstdcxx-ng>=12'; LD_LIBRARY_PATH may name another one")  # fmt: skip
    elif "GLIBC_" in reason:
        remedy = "this system's glibc is too old: wanted 2.34 or later (Debian 12, Ubuntu 22.04, RHEL 9)"
    else:
        remedy = f"the torch beside it may be damaged; run pip install --force-reinstall '{requirement()}'"
    return WrongTorch(f"{path} cannot be loaded: {reason}; {remedy}")


def _no_module():
    others = sorted({found[1] for path in FOLDER.glob("t*/_C.*") if (found := re.search(r"cpython-(\d+)", path.name))})
    if others:
        pythons = ", ".join(f"{other[0]}.{other[1:]}" for other in others)
        return (f"the Strata in {FOLDER.parent} was built for Python {pythons}, and this is Python "
                f"{sys.version_info.major}.{sys.version_info.minor}; install it with this Python: {sys.executable} -m "
                "pip install strata-train")  # fmt: skip
    return f"{FOLDER} holds no module; install the package again: pip install --force-reinstall strata-train"


def _numbers(minor):
    return tuple(int(number) for number in minor.split("."))
