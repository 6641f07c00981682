"""The programs that a newcomer runs first: the README's own loop, begun as a launcher begins it, and the demo."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import ON_GPU, gpus, shares_a_gpu
from ranks import run_ranks
from soak import also, each_once
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("examples")

DATASET = """
import torch
dataset = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(32)]
"""


def launch(folder, world, script, *arguments, fails=False):
    """Runs ``script`` on ``world`` ranks with torchrun's environment; returns each rank's output. Ranks share a single
    GPU."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = world == 0  # without a launcher
    ranks = []
    for rank in range(max(1, world)):
        local = 0 if shares_a_gpu() else rank
        own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {k: v for k, v in os.environ.items() if k not in own}
        of_rank = {} if alone else {k: str(v) for k, v in own.items()}
        environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80", **of_rank}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, str(script), *map(str, arguments)]
        ranks.append(subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ))
    texts = [process.communicate(timeout=500)[0] for process in ranks]
    for process, text in zip(ranks, texts):
        assert (process.returncode != 0) == fails, text
        assert "destroy_process_group" not in text, text
    return texts


def with_ranks_on_one_gpu(config):
    """Returns the configuration. Where ranks share a GPU, which is otherwise refused as a mistake, it allows that."""
    return config | ({"strata": {"collectives": "peer"}} if shares_a_gpu() else {})


def readme_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


def test_the_readmes_loop_trains_and_saves(tmp_path):
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    ))  # fmt: skip
    tiny.save_pretrained(tmp_path / "path/to/model")
    config = next(json.loads(block) for block in readme_blocks("json") if "zero_optimization" in block)
    (tmp_path / "ds_config.json").write_text(json.dumps(with_ranks_on_one_gpu(config)))
    loop = next(block for block in readme_blocks("python") if "engine.backward" in block)
    (tmp_path / "train.py").write_text(DATASET + loop)
    with gpus(False):
        launch(tmp_path, 2, "train.py")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).state_dict()
        for folder in ("path/to/model", "trained")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def _demo(folder, arguments):
    """Runs the demo on this rank; returns all that the process prints. The rank has torch and transformers from the
    start, which processes of a launcher import for seconds; the README's loop runs in those."""
    os.chdir(folder)
    script, said = str(REPOSITORY / "examples" / "train_stdlib.py"), Path(f"said.{os.environ['RANK']}")
    sys.argv = [script, *arguments]
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    text = said.read_text(encoding="utf-8")
    assert not code and "destroy_process_group" not in text, text
    return text


def run_demo(folder, world, *arguments):
    return run_ranks(world, _demo, folder, [*map(str, arguments)], timeout=500.0, env={"COLUMNS": "80"})


def _launch_demo(folder, world, *arguments):
    with gpus(False):
        return launch(folder, world, REPOSITORY / "examples" / "train_stdlib.py", *arguments)


@pytest.mark.parametrize("run", [run_demo, *also(_launch_demo)])
def test_the_demo_runs_from_beginning_to_end(tmp_path, run):
    """It goes on in a process of its own, whose interpreter ends in the usual way."""
    config = json.loads((REPOSITORY / "examples" / "ds_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(with_ranks_on_one_gpu(config)))
    said, silent = run(tmp_path, 2, "--config", "config.json", "--steps", 12, "--length", 64)
    assert silent == ""
    where = torch.cuda.get_device_name() if ON_GPU else "the CPU"
    assert f"2 ranks on {where} over" in said
    assert re.search(r"step ━+ 12/12 loss .* tokens/s +[\d.]+ MiB 0:00:00", said), "the bar is cut short:\n" + said
    assert max(map(len, said.splitlines())) <= 80, said
    assert "equal" in said and "NOT" not in said
    assert "checkpoint of 2 ranks after step 12" in said
    (resumed,) = _launch_demo(tmp_path, 1, "--config", "config.json", "--resume", "--steps", 3)
    assert re.search(r"resumed by 1 rank after step 12: held-out loss [\d.]+, saved [\d.]+: equal", resumed), resumed
    assert "went on to step 15" in resumed and max(map(len, resumed.splitlines())) <= 80, resumed


ENDS = """
import atexit, pathlib, torch
import torch.distributed as dist
def ends():  # after all other hooks: the first runs last
    threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("at the end:", dist.is_initialized(), sum(name.startswith("pt_gloo") for name in threads))
atexit.register(ends)
import strata
engine, *_ = strata.initialize(model=torch.nn.Linear(4, 4), config={config!r})
import torch.distributed.nn.functional  # whose defaults refer to the group for good
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item())
{last}
"""


@each_once({"world": [0, 2], "last": ["", "dist.destroy_process_group()", "raise ValueError('of the script')"]})
def test_the_process_group_is_gone_at_the_end(tmp_path, world, last):
    config = with_ranks_on_one_gpu({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    (tmp_path / "ends.py").write_text(ENDS.format(config=config, last=last))
    with gpus(False):
        texts = launch(tmp_path, world, "ends.py", fails="raise" in last)
    for text in texts:
        assert f"sum {max(1, world):.1f}" in text
        assert "at the end: False 0" in text
        assert text.count("Traceback") == ("raise" in last), text
