"""The site's form and the page of sizes say what the program says."""

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from soak import ALL
from test_command_line import find_program, run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import plan_tables  # noqa: E402


def test_the_page_of_sizes_is_what_the_program_says():
    page = (ROOT / "docs/SIZING.md").read_text()
    for line in plan_tables.table_rows(find_program(), ["Qwen3-8B"], [(1, 8), (4, 8)]):
        assert line in page, "run tools/plan_tables.py again"


DATA = json.loads((ROOT / "docs/assets/plan.json").read_text())
# model, adapters, job: indices of the lists; memory of device, host and drive in bytes; tokens, checkpointing
CHOICES = [
    ("Qwen3-8B", 0, 0, 80 << 30, 1 << 40, 8 << 40, 4096, True),
    ("Qwen3-8B", 1, 0, 24 << 30, 64 << 30, None, 8192, True),
    ("Qwen3-8B", 0, 3, 16 << 30, None, None, 0, False),
    *([("Qwen3-32B", 0, 0, 40 << 30, 256 << 30, 1 << 42, 2048, True)] if ALL else []),
]


# The form knows no choice of the engine by free memory.
PLAIN = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
         "strata": {"loss": "plain", "mlp_piece": 0, "activations": {"device": "device"}}}


@functools.cache
def _told(model, lora, job, device, host, drive, tokens, checkpointing):
    more = ["--device-memory", str(device)]
    more += ["--host-memory", str(host)] * (host is not None) + ["--nvme-space", str(drive)] * (drive is not None)
    more += ["--seq", str(tokens)] * (tokens > 0) + ["--checkpointing"] * checkpointing
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(json.dumps(PLAIN))
        config.flush()
        more += ["--config", config.name, "--grid"]
        return plan_tables.plan(find_program(), model, *DATA["jobs"][job], DATA["lora_ranks"][lora], *more)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice[0])
def test_the_exported_numbers_are_the_programs(choice):
    told = _told(*choice)
    model, lora, job, *_, tokens, checkpointing = choice
    assert DATA["models"][model]["bytes"][lora][job] == plan_tables.cells(told)
    if tokens:
        assert DATA["models"][model]["of_token"][checkpointing] * tokens == told["activations"]["bytes"]
    assert [(row["stage"], row["placement"]) for row in DATA["rows"]] == [
        (row["stage"], row["placement"]) for row in told["grid"]]


def test_every_exported_model_ships_with_the_program():
    known = run("plan", "--model", "none", "--world", 1, code=2).stderr
    assert set(DATA["models"]) == set(plan_tables.MODELS)
    assert all(f" {model}," in known or f" {model}:" in known for model in plan_tables.MODELS), known


@pytest.mark.skipif(shutil.which("node") is None, reason="the form's script runs in node, which is not installed")
def test_the_form_says_what_the_program_says():
    names = ("model", "lora", "job", "device", "host", "drive", "tokens", "checkpointing")
    script = f"""const {{planRows}} = require({json.dumps(str(ROOT / "docs/assets/plan.js"))});
        const data = require({json.dumps(str(ROOT / "docs/assets/plan.json"))});
        const choices = {json.dumps([dict(zip(names, choice)) for choice in CHOICES])};
        console.log(JSON.stringify(choices.map((choice) => planRows(data, choice))));"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    for choice, shown in zip(CHOICES, json.loads(done.stdout), strict=True):
        told = _told(*choice)
        ranks = DATA["jobs"][choice[2]][1]
        activations = told["activations"]["bytes"] if told["activations"] else 0
        assert shown["best"] == (-1 if told["best"] is None else told["best"]), choice
        for row, of_program in zip(shown["rows"], told["grid"], strict=True):
            assert row["device"] == of_program["device"]["total"] + activations
            assert row["host"] == of_program["host"]["total"] * ranks
            assert ("device" in row["lacking"]) == (of_program["fits"] is False)
            assert ("host" in row["lacking"]) == (of_program["host_fits"] is False)
            assert ("drive" in row["lacking"]) == (of_program["nvme_fits"] is False)
