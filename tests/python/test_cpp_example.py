"""The C++ example as a user sees it: built against an installed package, run as one process a rank."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import strata._C
from safetensors import safe_open
from soak import also

pytestmark = pytest.mark.xdist_group("cpp_example")  # one build folder

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "examples" / "cpp"
STEPS = 100


def find_build():
    """The build folder of the module under test, or the tree's own where that is an installed one."""
    for folder in (Path(strata._C.__file__).resolve().parents[4], REPOSITORY / "build" / "python"):
        if (folder / "CMakeCache.txt").exists():
            return folder
    raise FileNotFoundError("no build folder holds the C++ package; run `make build` first")


def run(*command):
    """Runs a command to its end; its output is the message when it fails."""
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"


@pytest.fixture(scope="module")
def program():
    """The example's program. Its folders keep their places, so that a second run compiles nothing; the compiler does
    not optimize what calls torch for nearly all of its time. STRATA_CPP_EXAMPLE names one that was built on another
    machine."""
    if "STRATA_CPP_EXAMPLE" in os.environ:
        return Path(os.environ["STRATA_CPP_EXAMPLE"])
    build = find_build()
    prefix, example = build / "cpp_example" / "prefix", build / "cpp_example" / "build"
    shutil.rmtree(prefix, ignore_errors=True)
    run("cmake", "--build", build, "--target", "strata_libraries")
    run("cmake", "--install", build, "--prefix", prefix, "--component", "cpp")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run(
        "cmake", "-S", SOURCE, "-B", example, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", *launcher,
    )  # fmt: skip
    run("cmake", "--build", example)
    return example / "train_reversal"


def free_port():
    """A port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(program, environment, *arguments):
    """One process, with `environment` on top of a clean one; nothing of an outer launcher reaches it."""
    clean = {k: v for k, v in os.environ.items() if not re.match("(TORCHELASTIC_|MASTER_|RANK$|WORLD_SIZE$)", k)}
    return subprocess.Popen(
        [str(program), *map(str, arguments)], env={**clean, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_ranks(program, world_size, *arguments):
    """Returns the output of rank 0; every rank must end without an error."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(program, {**shared, "RANK": str(rank)}, *arguments) for rank in range(world_size)]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)
    return outputs[0]


def losses_of(output):
    """The loss of every step."""
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss ([0-9.]+)", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def one(program):
    """The losses of one rank."""
    return losses_of(run_ranks(program, 1, SOURCE / "ds_config.json", STEPS))


def test_two_ranks_train_as_one_does_and_save_what_they_trained(program, one, tmp_path):
    config, folder = SOURCE / "ds_config.json", tmp_path / "saved"
    output = run_ranks(program, 2, config, STEPS, folder)
    two = losses_of(output)
    assert len(two) == STEPS and two[-1] < two[0] / 2
    # The ranks' mean sums the same fp32 gradients in another order; AdamW's first steps, whose size
    # hardly depends on the gradient's, carry the last bits into the weights.
    assert two == pytest.approx(one, rel=1e-3)
    assert "loss of the saved weights differs by" in output
    with safe_open(folder / "model.safetensors", "pt") as saved:
        names = set(saved.keys())
        assert saved.get_slice("blocks.0.qkv.weight").get_shape() == [192, 64]
    assert {"positions", "embedding.weight", "norm.weight", "blocks.2.down.bias"} <= names


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", *also("mics_shard_size")])
def test_shard_groups_train_as_one_rank_does(program, one, tmp_path, key):
    config = json.loads((SOURCE / "ds_config.json").read_text())
    config["zero_optimization"][key] = 2
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    four = losses_of(run_ranks(program, 4, path, STEPS, tmp_path / "saved"))
    assert four == pytest.approx(one, rel=1e-3)


def test_a_rank_without_its_number_is_told_what_to_set(program):
    rank = start(program, {"WORLD_SIZE": "2"}, SOURCE / "ds_config.json")
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode == 1
    assert "WORLD_SIZE is set, so RANK must be, too" in output


def test_a_number_beyond_the_world_is_refused(program):
    rank = start(program, {"WORLD_SIZE": "2", "RANK": "2"}, SOURCE / "ds_config.json")
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode == 1
    assert "RANK must be a whole number from 0 to 1; found '2'" in output


def test_a_rank_that_nobody_joins_names_who_is_missing(program, tmp_path):
    config = json.loads((SOURCE / "ds_config.json").read_text())
    config["strata"] = {"timeout_s": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    rank = start(program, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": str(free_port())}, path)
    output = rank.communicate(timeout=120)[0]
    assert rank.returncode == 1
    assert "rank 0 waited 1 s" in output and "these did not come: 1" in output


def test_an_optimizer_of_python_is_refused_by_its_path(program, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    rank = start(program, {}, path)
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode == 1
    assert "optimizer.type" in output and '"AdamW"' in output
