"""Starts jobs as users do: by `strata run`, or by torchrun, each rank in a process of its own. Tests that do not test
the start itself have a faster one."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import strata.compat
from ranks import run_ranks

RANKS_ON_THE_HOST = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def environment_of(**more):
    """The environment of this process, for models on the CPU."""
    kept = {name: value for name, value in os.environ.items() if name not in ("STRATA_COMPAT", "RANK", "WORLD_SIZE")}
    kept["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return {**kept, **RANKS_ON_THE_HOST, "STRATA_PYTHON": sys.executable, **more}


def with_pth(folder, environment):
    """The environment, in which Python reads ``strata-compat.pth`` at its start, as it does where it is installed.

    Args:
        folder: an empty one.
    """
    pth = Path(strata.compat.__file__).with_name("strata-compat.pth")
    installed = any((Path(p) / pth.name).exists() for p in [*site.getsitepackages(), site.getusersitepackages()])
    if installed:
        return environment
    (folder / pth.name).write_text(pth.read_text())
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(folder)!r})\n")
    return {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{environment['PYTHONPATH']}"}


def run(command, environment, code=0, timeout=400):
    """Returns the output of the command, which must end with ``code``."""
    done = subprocess.run([str(part) for part in command], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout)  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def forked(world, main, folder, name, *arguments):
    """Runs a job that calls ``main([folder, name, ...])`` on every rank; returns its ``told_by_ranks``. Its processes
    have torch and transformers from the start; under a launcher each of them would import for seconds."""
    arguments = [str(part) for part in (folder, name, *arguments)]
    run_ranks(world, main, arguments, timeout=400.0, env=RANKS_ON_THE_HOST)
    return told_by_ranks(folder, name, world)


def told_by_ranks(folder, name, world):
    """The content of FOLDER/NAME.rank<n>.json, which each rank of a job has written."""
    return [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(world)]


def torchrun(world):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
