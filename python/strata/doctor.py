"""``strata doctor``: the part that needs Python. Which torch and which libraries are here, and whether they fit.

The program ``strata doctor`` shows the machine first, then becomes ``python -m strata.doctor --machine JSON``. This
module imports neither torch nor the engine, so it works where they are missing or broken; processes of their own import
them, and may crash. ``python -m strata.doctor`` without that option, and ``ds_report`` under STRATA_COMPAT=deepspeed,
start the program. Exit codes: 0 fine, 1 something is wrong, 2 usage."""

import argparse
import importlib.metadata
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import __version__, torch_modules
from .checkpoint import supported_transformers

# The versions of libraries that Strata was tried with.
TRIED = (supported_transformers.requirement(), "accelerate>=1.11,<1.16", "peft>=0.18,<0.22", "trl>=0.24,<1.17",
         "safetensors>=0.4,<0.9")  # fmt: skip
_DEADLINE_S = 300  # of an import, which takes minutes from a cold network drive, and of ranks
_IMPORT = """
import json, re, torch
library = re.search(r"/\\S*libstdc\\+\\+\\.so\\S*", open("/proc/self/maps").read())[0]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
print(json.dumps({"version": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl,
                  "gpus": torch.cuda.device_count(), "libstdc++": library}), flush=True)
from strata import _C
print(json.dumps({"module": _C.__file__, "gpus": _C.usable_gpus()}))
"""


class Report:
    """Facts, problems that need a remedy, and notes. Each is printed at once, or all of them as JSON in ``close()``."""

    def __init__(self, machine, as_json):
        self.found = {"facts": {}, "problems": [], "notes": [], **machine}
        self._as_json = as_json

    def fact(self, name, text, **more):
        """``more``: values for programs."""
        self.found["facts"][name] = {"text": text, **more}
        self._print(name, text)

    def problem(self, text, kind="PROBLEM"):
        """``kind``: "note" for what only slows jobs down."""
        self.found[f"{kind.lower()}s"].append(text)
        self._print(kind, text)

    def close(self):
        """Prints the end; returns the exit code."""
        problems = len(self.found["problems"])
        if self._as_json:
            print(json.dumps({**self.found, "right": not problems}, indent=2))
        self._print("problems", f"{problems or 'none'}; to ask for help, paste all of these lines")
        return 1 if problems else 0

    def _print(self, name, text):
        if not self._as_json:
            print(f"{name:<13} {text}", flush=True)


def _require_one(report, package):
    """The folder of the package that an import would take; a second one on ``sys.path`` is a problem."""
    found = {}
    for entry in sys.path:
        init = Path(entry or ".", package, "__init__.py").absolute()
        if init.is_file():
            found.setdefault(init.resolve(), str(init.parent))
    if len(found) > 1:
        report.problem(f"this Python finds {package} {len(found)} times, and takes the first; uninstall the others, or "
                       f"remove their folders from PYTHONPATH: {', '.join(found.values())}")  # fmt: skip
    return next(iter(found.values()), None)


def _look_at_package(report):
    folder, modules = Path(__file__).parent, list(torch_modules.built())
    report.fact("Python", f"{sys.version.split()[0]}, {sys.executable}", path=sys.executable)
    report.fact("package", f"{__version__}, {folder}, for torch {', '.join(modules) or 'none'}", path=str(folder))
    _require_one(report, "strata")
    program = report.found["facts"].get("program", {"text": f"strata {__version__},"})["text"].split(",")[0]
    if program != f"strata {__version__}":
        report.problem(f"the program is {program}, and the package strata {__version__}; install both from one wheel, "
                       "and see PATH and STRATA_PYTHON")  # fmt: skip
    if not os.access(folder, os.W_OK):
        report.problem(f"{folder} is read-only: Strata runs, and pip cannot change it; for another version make an "
                       f"environment: {sys.executable} -m venv", "note")  # fmt: skip


def _look_at_torch(report):
    """Whether torch and the engine can be imported."""
    folder, version = _require_one(report, "torch"), torch_modules.installed()
    report.fact("torch", f"{version or 'none'}, {folder or 'no folder'}", version=version, path=folder)
    try:
        path = torch_modules.choose(version)
    except torch_modules.WrongTorch as error:
        report.problem(str(error))
        return False
    report.fact("module", f"{path}, of torch {path.with_name('built_for.txt').read_text().strip()}", path=str(path))
    done = _run([sys.executable, "-c", _IMPORT])
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if facts:
        report.fact("import torch", "{version}, CUDA {cuda}, NCCL {nccl}, GPUs: {gpus}".format(**facts[0]), **facts[0])
        library = facts[0]["libstdc++"]
        newest = max(map(int, re.findall(rb"GLIBCXX_3\.4\.(\d+)", Path(library).read_bytes())), default=0)
        report.fact("libstdc++", f"GLIBCXX_3.4.{newest}, {library}", newest=newest)
    if done.returncode == 0:
        report.fact("import strata", "{module}, GPUs: {gpus}".format(**facts[1]), **facts[1])
        if facts[0]["gpus"] > facts[1]["gpus"]:
            report.problem("torch sees GPUs that Strata does not; the lines about CUDA and GPUs say why")
        return True
    said = _reason(done)
    wrong = re.match(r"[\w.]*WrongTorch: (.*)", said)
    report.problem(wrong[1] if wrong else str(torch_modules.explain(said, path if facts else folder)))
    if missing := _missing_symbols(path, folder) if "undefined symbol" in said else ():
        report.problem(f"torch's libraries lack {len(missing)} symbols that {path} needs: {', '.join(missing)}")
    return False


def _run(command):
    """The finished process, which coreutils' timeout ends if it takes too long."""
    return subprocess.run(["timeout", "-k", "10", str(_DEADLINE_S), *command], capture_output=True, text=True)


def _reason(done):
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode < 0:
        return f"the process ended by {signal.Signals(-done.returncode).name}: {last}"
    return f"no answer within {_DEADLINE_S} s" if done.returncode == 124 else last


def _missing_symbols(path, torch_folder):
    """The names that no library of the module at ``path`` defines; Python's own are in the interpreter."""
    libraries = f"LD_LIBRARY_PATH={torch_folder}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"
    names = re.findall(r"undefined symbol: ([^\s,]+)", _run(["env", libraries, "ldd", "-r", str(path)]).stdout)
    names = sorted({name for name in names if not name.startswith(("Py", "_Py"))})
    return _run(["c++filt", *names]).stdout.splitlines() or names


def _look_at_libraries(report):
    for tried in TRIED:
        name, versions = re.match(r"(\w+)(.*)", tried).groups()
        version = _installed(name)
        report.fact(name, f"{version or 'none'}; tried: {versions}", version=version)
        if version and not _meets(versions, version):
            report.problem(f"Strata was not tried with {name} {version}; {sys.executable} -m pip install '{tried}'",
                           "PROBLEM" if name == "transformers" else "note")  # fmt: skip
    activation = sys.modules.get("strata.compat.activation")  # strata-compat.pth imports it
    gives_strata = activation is not None and activation.is_active()
    gives = "Strata" if gives_strata else "DeepSpeed, if it is there; under strata run it gives Strata"
    report.fact("deepspeed", f"{_installed('deepspeed') or 'none'}; 'import deepspeed' gives {gives}")
    if os.environ.get("STRATA_COMPAT") and not gives_strata:
        report.problem("STRATA_COMPAT has no effect: Python reads strata-compat.pth in site-packages alone, and Strata "
                       "is elsewhere on its path; install the wheel, or use strata run")  # fmt: skip


def _meets(versions, version):
    """Whether a version meets ">=4.55,<5.25,!=5.0.*"; its first two numbers count."""
    def minor(text):
        return [int(number) for number in re.findall(r"\d+", text)[:2]]

    holds = {">=": operator.ge, "<": operator.lt, "!=": operator.ne}
    return all(holds[sign](minor(version), minor(bound)) for sign, bound in re.findall(r"([<>=!]+)([\d.]+)", versions))


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try_ranks(report, count):
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--module", "strata.doctor_rank"]
    done = _run([sys.executable, "-m", *launcher])
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for stage, text in said:
        if stage != "error":
            report.fact(stage, f"{count} ranks: {text}")
    if done.returncode:
        errors = [text for stage, text in said if stage == "error"] or [_reason(done)]
        report.problem(f"{count} ranks cannot train together; they must reach each other over this host's network: "
                       f"{errors[0]}")  # fmt: skip


def find_program():
    """The program ``strata``: beside Python, in the build folder, or on PATH. None: there is none."""
    beside = [Path(sys.executable).with_name("strata"), Path(__file__).parents[2] / "bin" / "strata"]
    return next((str(path) for path in beside if path.is_file()), None) or shutil.which("strata")


def main(arguments):
    """Looks, prints, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="strata doctor", description="Says what is installed, and what is wrong.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--machine", type=json.loads, help="from the program: what it has found")
    given, _ = parser.parse_known_args(arguments)  # the program knows more
    report = Report(given.machine or {}, given.json)
    if not given.machine:
        program = find_program() or "strata"
        started = _run([program, "--version"])
        if started.returncode == 0:
            return subprocess.call([program, "doctor", *arguments], env={**os.environ, "STRATA_PYTHON": sys.executable})
        report.problem(f"the program {program} does not run, and says nothing of the machine: {_reason(started)}")
    _look_at_package(report)
    runs = _look_at_torch(report)
    _look_at_libraries(report)
    if given.ranks and runs:
        _try_ranks(report, given.ranks)
    return report.close()


def ds_report(*_options, **_more):
    """The program ``ds_report``, ``deepspeed.env_report``, under STRATA_COMPAT=deepspeed."""
    main([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
