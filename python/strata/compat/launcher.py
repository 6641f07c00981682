"""``strata run``: starts a training script on ranks, in which ``deepspeed`` is Strata.

It takes the arguments of DeepSpeed's launcher. torchrun starts and watches the ranks of a host; ssh reaches the hosts.
On one host this process becomes torchrun; on several it holds one ssh connection to each. Exit codes: those of the job;
2 for wrong arguments, with a message that names the remedy."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from . import NAME, VARIABLE

# The name of a file with environment variables for other hosts, in the working folder or the home folder. `accelerate
# launch` reads this constant from DeepSpeed's launcher.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500  # DeepSpeed's, and torchrun's
DEVICES = "CUDA_VISIBLE_DEVICES"
LOCAL = "localhost"
SLOTS_MAX = 4096
# Variables whose names begin with one of these are passed to other hosts.
PASSED_ON = ("NCCL_", "PYTHON", "UCX_", "STRATA_", "OMP_", "HF_", "TORCH", "GLOO_", "CUDA", "LD_LIBRARY_PATH", "FI_")


class UsageError(Exception):
    """The arguments, or a file that they name, are wrong."""


class Host(NamedTuple):
    """A slot is a GPU, or without GPUs a process, by its number on the host."""

    name: str
    slots: list


class Machine(NamedTuple):
    """The machine on which the command runs."""

    environment: dict
    gpus: int = 0
    folder: str = ""  # the working folder, which the job has on other hosts, too
    hostfile: str = ""  # the text of the hostfile; empty: there is none
    passed_on: dict = {}  # further variables for other hosts (DeepSpeed's ``.deepspeed_env``)


class Start(NamedTuple):
    """The command of one host: ``host`` (empty: this one), the arguments of python, and the host's own variables."""

    host: str
    arguments: list
    environment: dict


def parse_hostfile(text, path):
    """[Host] of lines "NAME slots=NUMBER"; further words, as MPI has them, and comments ("#") say nothing. ``path`` is
    for messages."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, (key, _, slots) = words[0], "".join(words[1:2]).partition("=")
        if not (key == "slots" and slots.isdecimal() and 0 < int(slots) <= SLOTS_MAX):
            raise UsageError(f'{path}:{number}: wanted "NAME slots=NUMBER"; found {line!r}')
        if any(host.name == name for host in hosts):
            raise UsageError(f"{path}:{number}: host '{name}' is named twice")
        hosts.append(Host(name, list(range(int(slots)))))
    if not hosts:
        raise UsageError(f"{path}: names no host")
    return hosts


def _parse_filter(hosts, text, option):
    """{host name: set of slots} of "HOST[:SLOT,...][@HOST...]"; a host without slots means all of its slots."""
    slots_of = {host.name: host.slots for host in hosts}
    named = {}
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        if name not in slots_of:
            raise UsageError(f"{option}: there is no host '{name}'; wanted HOST[:SLOT,...][@HOST...] of "
                             f"{', '.join(slots_of)}")  # fmt: skip
        for slot in slots.split(",") if colon else map(str, slots_of[name]):
            if not slot.isdecimal() or int(slot) not in slots_of[name]:
                raise UsageError(f"{option}: host '{name}' has no slot '{slot}'; its slots are "
                                 f"{','.join(map(str, slots_of[name]))}")  # fmt: skip
            named.setdefault(name, set()).add(int(slot))
    return named


def choose_hosts(hosts, include, exclude):
    """The hosts and slots that ``include`` names, or all but those that ``exclude`` names, in ``hosts``' order."""
    if include and exclude:
        raise UsageError("--include and --exclude: give one of the two")
    if not include and not exclude:
        return hosts
    named = _parse_filter(hosts, include or exclude, "--include" if include else "--exclude")
    chosen = [Host(host.name, [slot for slot in host.slots if (slot in named.get(host.name, ())) == bool(include)])
              for host in hosts]  # fmt: skip
    chosen = [host for host in chosen if host.slots]
    if not chosen:
        raise UsageError(f"--exclude {exclude}: leaves no slot")
    return chosen


def _visible_devices(machine):
    """[str]: the devices to which the user has limited this host; None: no limit."""
    if DEVICES not in machine.environment:
        return None
    return [name.strip() for name in machine.environment[DEVICES].split(",") if name.strip() not in ("", "-1")]


def _this_host(request, machine):
    visible = _visible_devices(machine)
    count = (machine.gpus if visible is None else len(visible)) or request.num_gpus or 0
    if count == 0:
        raise UsageError("--include, --exclude: this host has no GPU to choose" if request.include or request.exclude
                         else "this host has no GPU; --num_gpus N starts N ranks on the CPU")  # fmt: skip
    return [Host(LOCAL, list(range(count)))]


def _hosts_of(request, machine):
    if (request.include or request.exclude) and (request.num_gpus or request.num_nodes):
        raise UsageError("--include and --exclude name slots: leave --num_gpus and --num_nodes out")
    listed = bool(machine.hostfile)
    hosts = parse_hostfile(machine.hostfile, request.hostfile) if listed else _this_host(request, machine)
    hosts = choose_hosts(hosts, request.include, request.exclude)
    if request.num_nodes:
        if not listed and request.no_ssh:
            hosts = hosts * request.num_nodes  # the user starts this command on hosts that are alike
        if request.num_nodes > len(hosts):
            found = f"{len(hosts)} are named" if listed else "no host is named"
            raise UsageError(f"--num_nodes {request.num_nodes}: {found}; give a --hostfile that names more")
        hosts = hosts[: request.num_nodes]
    for host in hosts if request.num_gpus else ():
        if request.num_gpus > len(host.slots):
            raise UsageError(f"--num_gpus {request.num_gpus}: host '{host.name}' has {len(host.slots)}")
    return [Host(host.name, host.slots[: request.num_gpus or None]) for host in hosts]


def _start_of(request, machine, hosts, index, alone):
    arguments = ["-m", "torch.distributed.run", f"--nproc-per-node={len(hosts[index].slots)}"]
    if alone and not request.master_port and not request.master_addr:
        arguments.append("--standalone")  # on a port that is free
    else:
        first = request.master_addr or ("127.0.0.1" if alone else hosts[0].name)
        arguments += [f"--nnodes={1 if alone else len(hosts)}", f"--node-rank={index}", f"--master-addr={first}",
                      f"--master-port={request.master_port or DEFAULT_PORT}"]  # fmt: skip
    if request.log_folder:
        arguments += [f"--log-dir={request.log_folder}", "--redirects=3"]
    if request.no_python:
        arguments.append("--no-python")
    else:
        arguments += ["--module", "strata.compat.run"]
        arguments += ["--no_local_rank"] * request.no_local_rank + ["--module"] * request.module
    environment = {VARIABLE: NAME}
    if request.include or request.exclude:
        visible = _visible_devices(machine) if alone else None
        names = [visible[slot] if visible and slot < len(visible) else str(slot) for slot in hosts[index].slots]
        environment[DEVICES] = ",".join(names)
    return Start("" if alone else hosts[index].name, arguments + request.command, environment)


def plan_job(request, machine):
    """[Start], one for each host of the job: ``request``, of ``parser()``, on a ``Machine``. Starts nothing."""
    if not request.command:
        raise UsageError("name the script that is to run: strata run SCRIPT")
    if request.module and request.no_python:
        raise UsageError("--module and --no_python: give one of the two")
    if request.launcher not in ("ssh", "pdsh"):
        raise UsageError(f"--launcher {request.launcher}: hosts are reached by ssh alone; leave it out, or give "
                         "--no_ssh and start the command on each host yourself")  # fmt: skip
    if request.node_rank is not None and not request.no_ssh:
        raise UsageError("--node_rank: only with --no_ssh, where you start the command on each host")
    hosts = _hosts_of(request, machine)
    alone = len(hosts) == 1 and not request.force_multi
    starts = [_start_of(request, machine, hosts, index, alone) for index in range(len(hosts))]
    if not request.no_ssh:
        return starts
    if request.node_rank is None or not request.master_addr:
        raise UsageError("--no_ssh: say which host this is and where rank 0 is: --node_rank and --master_addr")
    if request.node_rank >= len(starts):
        raise UsageError(f"--node_rank {request.node_rank}: there are {len(starts)} hosts")
    return [starts[request.node_rank]._replace(host="")]


def ssh_command(start, request, machine):
    """The ssh command that makes one of several starts, in the same folder and with the same Python."""
    environment = {name: value for name, value in machine.environment.items()
                   if name.startswith(PASSED_ON) and name not in (DEVICES, VARIABLE)}  # fmt: skip
    environment |= machine.passed_on | start.environment
    words = [*(f"{name}={value}" for name, value in environment.items()), sys.executable, *start.arguments]
    port = ["-p", str(request.ssh_port)] if request.ssh_port else []
    # With a terminal the remote ranks end when the connection ends.
    return ["ssh", "-tt", "-o", "BatchMode=yes", *port, start.host,
            f"cd {shlex.quote(machine.folder)} && exec env {shlex.join(words)}"]  # fmt: skip


def run_together(commands):
    """Runs the commands as one job: when one fails, or a signal comes, it ends the others, too. Returns the exit code
    of the first that failed, 0 if none did."""
    running, result = {}, 0

    def end(code):
        nonlocal result
        result = result or code
        for process in running.values():
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: end(128 + number))
    try:
        for command in commands:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            running[process.pid] = process
    except OSError as error:
        print(f"strata run: cannot run '{command[0]}', which reaches the hosts; install it, or use --no_ssh: "
              f"{error.strerror}", file=sys.stderr)  # fmt: skip
        end(1)
    while running:
        pid, status = os.wait()
        if running.pop(pid, None) is None:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            end(code if code > 0 else 128 - code)
    return result


def _between(least, most):
    def number(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"wanted a number from {least} to {most}; found {text!r}")
        return int(text)

    return number


def parser():
    """The argparse.ArgumentParser of ``strata run``."""
    result = argparse.ArgumentParser(
        prog="strata run", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs a training script on ranks, unchanged, with Strata in DeepSpeed's place.",
        epilog="""The script and its own arguments come after the options. Options are those of DeepSpeed's launcher;
torchrun starts the ranks, ssh reaches hosts.

Examples:
  strata run train.py --deepspeed ds.json             on all GPUs
  strata run --num_gpus 2 train.py                    without GPUs: two ranks on the CPU
  strata run --include localhost:1,3 train.py         on two of them
  strata run --hostfile hosts --num_nodes 2 train.py""",
    )  # fmt: skip
    add, port = result.add_argument, _between(1, 65535)
    add("--num_gpus", "--num_accelerators", type=_between(1, SLOTS_MAX), metavar="N",
        help="ranks of each host; by default all GPUs")  # fmt: skip
    add("--num_nodes", type=_between(1, 65536), metavar="N", help="the first N hosts of the hostfile")
    add("-H", "--hostfile", default="", help=f'lines "HOST slots=N"; {DEFAULT_HOSTFILE}, if there is one')
    add("-i", "--include", default="", help="only HOST[:SLOT,...][@HOST...]")
    add("-e", "--exclude", default="", help="all but HOST[:SLOT,...][@HOST...]")
    add("--master_addr", default="", help="the host of rank 0; by default the first")
    add("--master_port", type=port, metavar="N", help=f"its port; by default one that is free, or {DEFAULT_PORT}")
    add("--ssh_port", type=port, metavar="N", help="the port on which the hosts listen for ssh")
    add("--launcher", default="ssh", help="ssh, which pdsh also means")
    add("--force_multi", action="store_true", help="use ssh for a single host, too")
    add("--no_ssh", action="store_true", help="start this host's ranks alone, as --node_rank")
    add("--node_rank", type=_between(0, 65536), metavar="N", help="with --no_ssh: which host this is")
    add("--enable_each_rank_log", default="", dest="log_folder", metavar="FOLDER", help="a folder for ranks' output")
    add("--module", action="store_true", help="SCRIPT is a module, as of python -m")
    add("--no_python", action="store_true", help="SCRIPT is a program")
    add("--no_local_rank", action="store_true", help="never pass --local_rank; by default scripts get it that name it")
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    return result


def _this_machine(request):
    if not request.hostfile and os.path.exists(DEFAULT_HOSTFILE):
        request.hostfile = DEFAULT_HOSTFILE
    try:
        hostfile = Path(request.hostfile).read_text() if request.hostfile else ""
    except OSError:
        raise UsageError(f"--hostfile: '{request.hostfile}' cannot be read") from None
    gpus = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))
    passed_on = {}  # as in DeepSpeed, the file of the working folder comes last, and counts
    for folder in (os.path.expanduser("~"), os.getcwd()):
        passed_on |= read_environment(Path(folder, DEEPSPEED_ENVIRONMENT_NAME))
    return Machine(dict(os.environ), gpus, os.getcwd(), hostfile, passed_on)


def read_environment(path):
    """{name: value} of the lines NAME=VALUE of a ``.deepspeed_env``, if there is one; "#" begins a comment."""
    try:
        lines = path.read_text().splitlines() if path.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not equals:
                raise UsageError(f"{path}:{number}: wanted NAME=VALUE; found {line!r}")
            found[name.strip()] = value.strip().strip('"')  # DeepSpeed puts values into quotes for a shell
    return found


def main(arguments=None):
    """Starts the job; returns its exit code if this process does not become torchrun."""
    request = parser().parse_args(arguments)
    try:
        machine = _this_machine(request)
        starts = plan_job(request, machine)
    except UsageError as error:
        print(f"strata run: {error}", file=sys.stderr)
        return 2
    if len(starts) == 1 and not starts[0].host:
        os.execve(sys.executable, [sys.executable, *starts[0].arguments], machine.environment | starts[0].environment)
    return run_together([ssh_command(start, request, machine) for start in starts])


def run(arguments=None):
    """The program ``deepspeed``, ``deepspeed.launcher.runner.main``, under STRATA_COMPAT=deepspeed."""
    sys.exit(main(arguments))


if __name__ == "__main__":
    run()
