"""Jobs of scripts written for DeepSpeed, begun as users begin them: on DeepSpeed, or on Strata in its place."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

from job_memory import JobMemory, family

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "python" / "pkg"
GIB = 1 << 30
ENDING_S = 10  # that a job has, which is told to end
LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {config}
  zero3_init_flag: true
machine_rank: 0
num_machines: 1
num_processes: {world}
"""

# The lines of JSON that a job has written, the seconds of the whole command, and its ``JobMemory``.
Outcome = namedtuple("Outcome", "told seconds memory")


class Failed(Exception):
    """A job failed; the message has the end of its output.

    Attributes:
        told: the lines of JSON that it had written.
    """

    def __init__(self, message, told=()):
        super().__init__(message)
        self.told = list(told)


def environment_of(device, base):
    """That of a job's processes.

    Args:
        device: "cuda" or "cpu".
        base: the environment to begin with.
    """
    where = [] if importlib.util.find_spec("strata") else [str(PACKAGE)]
    own = {name: value for name, value in base.items() if name != "STRATA_COMPAT"}
    environment = {**own, "PYTHONPATH": os.pathsep.join([*where, *(p for p in sys.path if p)]),
                   "STRATA_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}  # fmt: skip
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return environment


def with_compatibility(environment, folder):
    """The environment in which ``deepspeed`` is Strata in every process, as where the wheel is installed: Python reads
    the wheel's strata-compat.pth at its start.

    Args:
        folder: to be made; what is put before other packages lies there.
    """
    folder.mkdir(exist_ok=True)
    spec = importlib.util.find_spec("strata")
    package = Path(spec.origin).parent if spec else PACKAGE / "strata"
    (folder / "strata-compat.pth").write_text((package / "compat" / "strata-compat.pth").read_text())
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(folder)!r})\n")
    path = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    return {**environment, "PYTHONPATH": path, "STRATA_COMPAT": "deepspeed"}


def strata_program():
    """The path of the program ``strata``.

    Raises:
        FileNotFoundError: it is nowhere.
    """
    spec = importlib.util.find_spec("strata")
    package = Path(spec.origin).parent.parent if spec else PACKAGE
    beside = [package.parent / "bin" / "strata", Path(sys.executable).parent / "strata"]
    found = next((str(path) for path in beside if path.exists()), shutil.which("strata"))
    if found is None:
        raise FileNotFoundError(f"the program strata is neither in {beside[0].parent} nor on PATH; run `make module`")
    return found


def has_deepspeed():
    """Whether DeepSpeed itself is installed."""
    try:
        return "strata" not in importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False


def torchrun(world):
    """[str]: the start of a command that runs a script on ``world`` ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]


def accelerate_launch(folder, config, world):
    """[str or Path]: the start of a command that runs a script on ``world`` ranks, by a file as `accelerate config`
    writes it.

    Args:
        folder: where that and the configuration, a dict, are written.
    """
    written, launch = folder / "ds.json", folder / "accelerate.yaml"
    written.write_text(json.dumps(config))
    launch.write_text(LAUNCH.format(config=written, world=world))
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launch]


def run_job(command, environment, gpus, timeout_s, tell=None):
    """The Outcome of a job; lines of JSON are those that begin with a brace and a quote.

    Args:
        command: [str or Path].
        gpus: how many of them it uses.
        tell: is called with each line of JSON, as a string, when it comes.

    Raises:
        Failed: it ended with another status than 0, or not within ``timeout_s``.
    """
    with JobMemory(gpus) as memory:
        began = time.monotonic()
        job = subprocess.Popen([str(part) for part in command], env=environment, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        memory.watch(job.pid)
        written = _Written(job.stdout, tell)
        try:
            job.wait(timeout_s)
        except BaseException as error:
            _end(job)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"it did not end within {timeout_s:g} s\n{written.end()}", written.told) from None
            raise
        end, seconds = written.end(), time.monotonic() - began
    if job.returncode:
        raise Failed(f"it ended with {job.returncode}\n{end}", written.told)
    return Outcome(written.told, seconds, memory)


class _Written:
    """A job's output, read as it comes, so that the output of a job which is ended late is there."""

    def __init__(self, stream, tell):
        self.told, self._lines, self._stream, self._tell = [], [], stream, tell
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._stream:
            self._lines.append(line)
            if line.startswith('{"'):
                self.told.append(json.loads(line))
                if self._tell:
                    self._tell(line.rstrip())

    def end(self):
        """The last of it, once the job has ended."""
        self._reader.join(ENDING_S)  # not for ever: a process that has outlived the job may hold the pipe
        return "".join(self._lines)[-3000:]


def _end(job):
    """Ends a job and what it has begun: launchers end their ranks, but not ranks that hang."""
    handles = []
    for pid in family(job.pid):
        try:
            handles.append(os.pidfd_open(pid))  # the number may be another process's by the time it is used
        except ProcessLookupError:
            pass
    job.terminate()
    try:
        job.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        pass
    for handle in handles:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(handle)
    job.wait()
