"""``strata run``: hostfiles, filters, the arguments of torchrun and of ssh, and jobs of several hosts."""

import os
import shlex
import subprocess
import sys

import pytest
from strata.compat.launcher import (
    Host, Machine, UsageError, choose_hosts, main, parse_hostfile, parser, plan_job, read_environment, ssh_command,
)
from strata.compat.launcher import run as run_as_deepspeed
from test_command_line import find_program

TWO_HOSTS = "# the cluster\nworker-0 slots=4 max_slots=8\n\n  worker-1\tslots=2 # half\n"
FOUR_GPUS = Machine({}, gpus=4)


def request_of(*arguments, command=("train.py", "--lr", "1")):
    return parser().parse_args([*arguments, *command])


def test_a_hostfile_has_hosts_slots_and_comments():
    assert parse_hostfile(TWO_HOSTS, "hosts") == [Host("worker-0", [0, 1, 2, 3]), Host("worker-1", [0, 1])]


@pytest.mark.parametrize("second", ["b", "b slots=x", "a slots=2", "b slots=0", "b max=2 slots=1", "b 3", "b slots=-1"])
def test_a_wrong_line_of_a_hostfile_is_named(second):
    with pytest.raises(UsageError, match="hosts:2:"):
        parse_hostfile(f"a slots=1\n{second}\n", "hosts")


def test_a_hostfile_names_a_host():
    with pytest.raises(UsageError, match="names no host"):
        parse_hostfile("# none\n", "hosts")


def test_hosts_are_included_and_excluded_as_under_deepspeed():
    hosts = parse_hostfile(TWO_HOSTS, "hosts")
    assert choose_hosts(hosts, "worker-1@worker-0:2,0", "") == [Host("worker-0", [0, 2]), Host("worker-1", [0, 1])]
    assert choose_hosts(hosts, "worker-0:1@worker-0:1,3", "") == [Host("worker-0", [1, 3])]
    assert choose_hosts(hosts, "", "worker-1@worker-0:0") == [Host("worker-0", [1, 2, 3])]
    wrong = [("worker-2", ""), ("worker-1:2", ""), ("worker-1:", ""), ("worker-0:a", ""), ("worker-0", "worker-1"),
             ("", "worker-0@worker-1")]  # fmt: skip
    for include, exclude in wrong:
        with pytest.raises(UsageError, match="--include|--exclude"):
            choose_hosts(hosts, include, exclude)


def test_all_gpus_of_this_host_start_on_a_free_port():
    (start,) = plan_job(request_of(), FOUR_GPUS)
    assert start.host == "" and start.environment == {"STRATA_COMPAT": "deepspeed"}
    assert start.arguments == ["-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone", "--module",
                               "strata.compat.run", "train.py", "--lr", "1"]  # fmt: skip


def test_deepspeeds_options_are_torchruns():
    given = ["--num_gpus=2", "--master_port=1234", "--module", "--no_local_rank", "--enable_each_rank_log=logs"]
    (start,) = plan_job(request_of(*given, command=["package.train"]), Machine({}))
    assert start.arguments[2:] == [
        "--nproc-per-node=2", "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1234",
        "--log-dir=logs", "--redirects=3", "--module", "strata.compat.run", "--no_local_rank", "--module",
        "package.train"]  # fmt: skip
    given = request_of("--num_gpus=2", "--no_python", command=["./train.sh", "--num_gpus", "9"])
    (start,) = plan_job(given, Machine({}))
    assert start.arguments[-4:] == ["--no-python", "./train.sh", "--num_gpus", "9"]  # the script's own


def test_chosen_gpus_are_those_that_the_user_sees():
    limited = Machine({"CUDA_VISIBLE_DEVICES": "4,5, 7"}, gpus=8)
    (start,) = plan_job(request_of("--include=localhost:1,2"), limited)
    assert "--nproc-per-node=2" in start.arguments and start.environment["CUDA_VISIBLE_DEVICES"] == "5,7"
    (start,) = plan_job(request_of("--exclude=localhost:0"), FOUR_GPUS)
    assert start.environment["CUDA_VISIBLE_DEVICES"] == "1,2,3"


def test_the_hosts_of_a_hostfile_are_reached_in_its_order():
    request = request_of("-H", "hosts", "-e", "worker-0:3", "--ssh_port=2222")
    variables = {"NCCL_DEBUG": "it's", "SECRET": "x", "PATH": "p", "CUDA_VISIBLE_DEVICES": "3"}
    machine = Machine(variables, 0, "/a b", TWO_HOSTS, {"MINE": "1"})
    first, second = plan_job(request, machine)
    assert (first.host, second.host) == ("worker-0", "worker-1")
    assert second.arguments[2:] == [
        "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=worker-0", "--master-port=29500",
        "--module", "strata.compat.run", "train.py", "--lr", "1"]  # fmt: skip
    *ssh, command = ssh_command(first, request, machine)
    assert ssh == ["ssh", "-tt", "-o", "BatchMode=yes", "-p", "2222", "worker-0"]
    assert command.startswith("cd '/a b' && exec env ") and "SECRET" not in command
    words = shlex.split(command)
    told = words[words.index("env") + 1 : words.index(sys.executable)]
    assert set(told) == {"NCCL_DEBUG=it's", "MINE=1", "STRATA_COMPAT=deepspeed", "CUDA_VISIBLE_DEVICES=0,1,2"}
    assert words[words.index(sys.executable) + 1 :] == first.arguments


def test_a_file_has_variables_for_other_hosts(tmp_path, monkeypatch, capsys):
    path = tmp_path / ".deepspeed_env"
    path.write_text('# of the cluster\nNCCL_DEBUG=INFO\n\n LD = a=b \nQUOTED="x y"\n')
    assert read_environment(path) == {"NCCL_DEBUG": "INFO", "LD": "a=b", "QUOTED": "x y"}
    assert read_environment(tmp_path / "none") == {}
    path.write_text("A=1\nexport\n")
    with pytest.raises(UsageError, match=r"\.deepspeed_env:2: wanted NAME=VALUE; found 'export'"):
        read_environment(path)
    monkeypatch.chdir(tmp_path)
    assert main(["--num_gpus", "1", "x.py"]) == 2 and "wanted NAME=VALUE" in capsys.readouterr().err


def test_the_working_folders_variables_count_more_than_the_homes(tmp_path, monkeypatch):
    for folder, text in (("home", "A=home\nB=home"), ("work", "A=work")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".deepspeed_env").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    started = []
    monkeypatch.setattr("strata.compat.launcher.run_together", lambda commands: started.extend(commands) or 0)
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    assert main(["-H", "../hosts", "x.py"]) == 0
    assert all(" A=work " in command[-1] and " B=home " in command[-1] for command in started) and len(started) == 2


def test_the_program_deepspeed_is_the_launcher(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--launcher=openmpi", "--num_gpus=2", "x.py"])
    with pytest.raises(SystemExit, match="2"):
        run_as_deepspeed()
    assert "by ssh alone" in capsys.readouterr().err


def test_one_host_needs_no_ssh():
    machine = Machine({}, hostfile=TWO_HOSTS)
    assert plan_job(request_of("-H", "hosts", "--num_nodes=1"), machine)[0].host == ""
    assert plan_job(request_of("-H", "hosts", "--num_nodes=1", "--force_multi"), machine)[0].host == "worker-0"
    alone = ["--no_ssh", "--node_rank=1", "--master_addr=10.0.0.1", "--num_nodes=2"]
    for given in ([*alone, "-H", "hosts"], alone):  # without a hostfile hosts are alike
        (start,) = plan_job(request_of(*given), machine if "-H" in given else FOUR_GPUS)
        assert start.host == "" and {"--node-rank=1", "--nnodes=2", "--master-addr=10.0.0.1"} <= set(start.arguments)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num_gpus=5"], "--num_gpus 5: host 'localhost' has 4"),
        (["--num_gpus=3", "--include=localhost:0"], "leave --num_gpus and --num_nodes out"),
        (["--num_nodes=2"], "give a --hostfile"),
        (["--launcher=openmpi"], "by ssh alone"),
        (["--no_ssh"], "--node_rank and --master_addr"),
        (["--node_rank=1"], "only with --no_ssh"),
        (["--no_ssh", "--node_rank=1", "--master_addr=a"], "there are 1 hosts"),
        (["--module", "--no_python"], "give one of the two"),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(given, said):
    with pytest.raises(UsageError, match=said):
        plan_job(request_of(*given), FOUR_GPUS)


def test_a_host_without_gpus_wants_a_number_of_ranks():
    with pytest.raises(UsageError, match="--num_gpus N starts N ranks on the CPU"):
        plan_job(request_of(), Machine({}))
    with pytest.raises(UsageError, match="strata run SCRIPT"):
        plan_job(request_of(command=[]), FOUR_GPUS)


def test_the_command_line_teaches_it(capsys, tmp_path):
    assert main(["--hostfile", str(tmp_path / "none"), "x.py"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--num_gpus", "none", "x.py"])
    assert "wanted a number from 1 to 4096" in capsys.readouterr().err
    help = subprocess.run([find_program(), "run", "--help"], capture_output=True, text=True)
    assert help.returncode == 0 and "--hostfile" in help.stdout
    assert subprocess.run([find_program(), "run"], capture_output=True).returncode == 2


def run_commands(*commands):
    """Runs the commands from a process of its own, since run_together() handles the process's signals."""
    text = f"from strata.compat.launcher import run_together; raise SystemExit(run_together({commands!r}))"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)


def test_the_hosts_of_a_job_end_together(tmp_path):
    """A host that fails ends the others, which would wait for ever; its exit code is the job's."""
    os.mkfifo(tmp_path / "never")
    assert run_commands(["cat", str(tmp_path / "never")], ["sh", "-c", "exit 7"]).returncode == 7
    assert run_commands(["true"], ["true"]).returncode == 0
    missing = run_commands(["cat", str(tmp_path / "never")], ["/nowhere/ssh"])
    assert missing.returncode == 1 and "cannot run '/nowhere/ssh'" in missing.stderr
