"""tools/transformers_environment.sh: an environment finds the packages of those under it. Tests run offline."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "transformers_environment.sh"


def _environment(folder, module, below=None):
    """A virtual environment with one module, and a .pth file that names the packages of ``below``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = _packages(folder)
    (packages / f"{module}.py").write_text(f"NAME = {module!r}\n")
    if below:
        (packages / "below.pth").write_text(f"{_packages(below)}\n")
    return folder


def _packages(folder):
    return folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)


@pytest.mark.soak  # it meets what `make test-transformers` sets up
@pytest.mark.parametrize("nested, version", [(False, "newest"), (True, "newest"), (False, "4.57.6")])
def test_it_stands_on_all_that_its_environment_stands_on(tmp_path, nested, version):
    below = _environment(tmp_path / "below", "of_below")
    venv = _environment(tmp_path / "venv", "of_venv", below) if nested else below
    offline = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    command = ["sh", SCRIPT, venv, tmp_path / "target", version]
    made = subprocess.run(command, env=offline, capture_output=True, text=True)
    wanted = "transformers" if version == "newest" else f"transformers=={version}"
    assert f"No matching distribution found for {wanted}\n" in made.stderr, made.stdout + made.stderr
    names = ["of_below", "of_venv"] if nested else ["of_below"]
    look = [tmp_path / "target" / "bin" / "python", "-c", f"import {', '.join(names)}"]
    found = subprocess.run(look, env={}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
