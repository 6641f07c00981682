"""The wheels in dist/ in fresh environments: each Python that is here beside several versions of torch. `make wheels`
builds them. An environment is made of the wheel, torch and transformers alone; STRATA_WHEEL_ENVIRONMENTS names the
folder that keeps them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHES = ("2.11.0", "2.13.0", "2.15.0")
TRANSFORMERS = "5.17.0"
WHEELS = {re.search(r"-cp3(\d+)-", wheel.name)[1]: wheel for wheel in sorted(REPOSITORY.glob("dist/*.whl"))}
CASES = [pytest.param(minor, torch, id=f"3.{minor}-{torch}", marks=pytest.mark.xdist_group(torch))
         for minor in WHEELS for torch in TORCHES if not (minor == "10" and torch == "2.15.0")]  # fmt: skip

pytestmark = pytest.mark.skipif(not WHEELS, reason="dist/ has no wheel; run make wheels")
_seen = {}  # torch -> {Python: losses}


def run(*command, **more):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    done = subprocess.run([str(part) for part in command], env=environment, cwd=more.get("PWD"), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=1800)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def python(request, tmp_path):
    """The interpreter of a new environment with the wheel and torch."""
    minor, torch = request.param
    folder = Path(os.environ.get("STRATA_WHEEL_ENVIRONMENTS", tmp_path)) / f"3.{minor}-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"python3.{minor}", "-m", "venv", folder], check=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    install = [uv, "pip", "install", "-q", "--python", folder / "bin" / "python"] if uv else [
        folder / "bin" / "python", "-m", "pip", "install", "-q"]  # fmt: skip
    run(*install, WHEELS[minor], f"torch=={torch}", f"transformers=={TRANSFORMERS}")
    yield folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("minor, torch, python", [(*case.values, case.values) for case in CASES],
                         ids=[case.id for case in CASES], indirect=["python"])  # fmt: skip
def test_the_wheel_trains_in_a_fresh_environment(python, minor, torch, tmp_path):
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*torchrun, REPOSITORY / "tests/soak/wheels/job.py", tmp_path)
    losses = json.loads(said.splitlines()[-1])
    assert losses.pop("torch").startswith(torch) and f"t2_{torch.split('.')[1]}" in losses.pop("module")
    plain = losses.pop("plain")
    # The numbers differ between versions where torch's own do.
    for other_plain, other in _seen.values():
        if other_plain == plain:
            assert other["stage 3"] == losses["stage 3"]
    _seen[minor, torch] = plain, losses

    demo = run(*torchrun, REPOSITORY / "examples/train_stdlib.py", "--config", REPOSITORY / "examples/ds_config.json",
               "--steps", "20", PWD=str(tmp_path))  # fmt: skip
    assert re.search(r"held-out loss: engine .*: equal", demo), demo
    assert run(python.with_name("strata"), "--version").startswith("strata ")
