"""Configurations of public repositories: each starts and takes two steps on two ranks, or is refused by the name of a
feature that Strata does not have. docs/REAL_CONFIGS.md says which; this module writes it:

    python tests/python/test_real_configs.py
"""

import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import strata
import torch
from ranks import run_ranks
from strata.compat.engine import initialize as initialize_as_deepspeed
from test_command_line import find_program
from tiny_models import loss_of, make_batches, make_model, rank_and_world

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "real_configs").glob("*.json"))
PAGE = ROOT / "docs" / "REAL_CONFIGS.md"
WIDTH = 16


def sources():
    """{file: (repository@commit:path, note)}, of the table beside the files."""
    rows = re.findall(r"^\| (\S+\.json) \| (.*?) \| (.*?) \|$", (FILES[0].parent / "README.md").read_text(), re.M)
    return {name: (source, note.strip()) for name, source, note in rows}


def _is_auto(value):
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == "auto" or any(_is_auto(v) for v in values)


class _Arguments(types.SimpleNamespace):
    """The arguments of Trainer that its configuration uses."""

    def get_warmup_steps(self, num_training_steps):
        return self.warmup_steps


def _filled_in(document, world):
    """Replaces "auto" as Trainer does, by transformers' own code. Trainer's check that other values agree with its
    arguments is left out, since there is no Trainer here."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    names = ("is_auto", "fill_match", "fill_only", "trainer_config_process", "trainer_config_finalize")
    filler_class = type("Filler", (HfDeepSpeedConfig,), {name: vars(HfTrainerDeepSpeedConfig)[name] for name in names})
    filler = filler_class(document)
    filler.mismatches = []
    given = {key: value for key, value in document.items() if isinstance(value, int)}
    warmup = document.get("scheduler", {}).get("params", {}).get("warmup_num_steps", "auto")
    fp16 = document.get("fp16", {}).get("enabled") is True or ("fp16" in document and "bf16" not in document)
    arguments = _Arguments(
        world_size=world, per_device_train_batch_size=given.get("train_micro_batch_size_per_gpu", 2),
        gradient_accumulation_steps=given.get("gradient_accumulation_steps", 2), max_grad_norm=1.0,
        warmup_steps=1 if warmup == "auto" else warmup, learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.999,
        adam_epsilon=1e-8, weight_decay=0.01, save_on_each_node=False, fp16=fp16, bf16=not fp16, fp16_full_eval=False,
        bf16_full_eval=False,
    )  # fmt: skip
    filler.trainer_config_process(arguments)
    filler.mismatches = []
    model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=WIDTH))
    filler.trainer_config_finalize(arguments, model, num_training_steps=10)
    if not any(name in filler.config for name in ("train_batch_size", "train_micro_batch_size_per_gpu")):
        filler.config["train_micro_batch_size_per_gpu"] = 2  # as Trainers of that time wrote it in any case
    return filler.config


def _redirected(document, folder):
    """The same configuration, with this test's folders for its output."""
    zero = document.get("zero_optimization", {})
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("nvme_path"):
            zero[section]["nvme_path"] = folder
    for section in ("tensorboard", "csv_monitor"):
        if "output_path" in document.get(section, {}):
            document[section]["output_path"] = folder
    return document


def _take_two_steps(document, folder):
    """Trains two steps; returns a description of the training, in words."""
    rank, world = rank_and_world()
    filled = _is_auto(document) or not any("batch_size" in key for key in document)
    config = _filled_in(document, world) if filled else document
    config = _redirected(config, folder)
    if config.pop("sequence_parallel_size", 1) > 1:  # the model is none of transformers
        config.pop("train_batch_size", None)
    model = make_model(width=WIDTH)
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=1e-3)
    initialize = initialize_as_deepspeed if filled else strata.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    try:
        passes = 2 * engine.gradient_accumulation_steps()
        samples = engine.train_micro_batch_size_per_gpu()
        for tokens in make_batches(passes, world, samples=samples, length=3)[:, rank]:
            loss = loss_of(engine, tokens)
            assert math.isfinite(loss.item())
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == 2
        report = engine.memory_report()
        places = sorted({tier for tier, kind in report if kind == "optimizer state" and report[tier, kind][1] > 0})
        dtype = next(iter(engine.module.parameters())).dtype
        return f"trains at stage {engine.zero_optimization_stage()} in {str(dtype).removeprefix('torch.')}" + (
            "" if places in ([], ["device"]) else f", states on {' and '.join(places)}") + (
            "; filled in by Trainer" if filled else "")
    finally:
        engine.destroy()


def _outcomes(paths, folder):
    """{file: the outcome in words, or the message of its refusal}."""
    told = {}
    for path in paths:
        try:
            config = json.loads(Path(path).read_text())
            if "tensorboard" in config:
                config["tensorboard"]["enabled"] = False  # the tests' environment lacks its package
            told[Path(path).name] = _take_two_steps(config, folder)
        except strata.ConfigError as error:
            told[Path(path).name] = f"refused: {error}"
    return told


def _page(outcomes):
    trained = sum(not text.startswith("refused") for text in outcomes.values())
    lines = f"""# Real configurations

<!-- Written by tests/python/test_real_configs.py. -->

{len(outcomes)} DeepSpeed configurations of public repositories, unchanged (`tests/real_configs`): {trained} start and
take two steps on two ranks, {len(outcomes) - trained} ask for a feature that Strata does not have. Where a file says
"auto", transformers' own code has filled it in, as under Trainer. [CONFIG.md](CONFIG.md) has every key, and
`strata check ds.json` ([how](COMMAND_LINE.md#check)) says the same of a file of yours.

| configuration | from | outcome |
|---|---|---|
""".splitlines()
    known = sources()
    for name, outcome in outcomes.items():
        source, note = known[name]
        origin = f"{source} ({note})" if note else source
        lines.append(f"| `{name}` | {origin} | {outcome.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def outcomes_of(paths, folder):
    """The outcomes, on which two ranks agree."""
    (folder / "drive").mkdir()
    told = run_ranks(2, _outcomes, [str(path) for path in paths], str(folder / "drive"))
    assert told[0] == told[1]
    return told[0]


def test_each_trains_or_names_a_feature_that_strata_does_not_have(tmp_path):
    outcomes = outcomes_of(FILES, tmp_path)
    for name, outcome in outcomes.items():
        assert re.match(r"trains|refused: [\w.]+: not supported \(", outcome), f"{name}: {outcome}"
    assert PAGE.read_text() == _page(outcomes), f"{PAGE.name} is out of date: python tests/python/test_real_configs.py"


def test_what_the_program_rewrites_starts(tmp_path):
    """The engine refuses the settings that the program calls refused, and trains with those that the program writes
    instead; the program leaves other configurations unchanged."""
    program, rewritten = find_program(), []
    for path in FILES:
        out = tmp_path / path.name
        done = subprocess.run([program, "check", path, "--fix", out, "--json"], capture_output=True, text=True)
        told = json.loads(done.stdout)
        refused = [key["key"] for key in told["keys"] if key["verdict"] == "refused"]
        assert done.returncode == (1 if refused else 0), done.stderr
        changed = refused + [key["key"] for key in told["keys"] if key["verdict"] == "old spelling"]
        assert told["written"] == (None if refused == ["optimizer.type"] else str(out))
        if "sequence_parallel_size" in refused:
            continue  # its batch size is that of ranks which share a sequence
        if changed and told["written"]:
            rewritten.append(out)
        elif told["written"] and not any(key["verdict"] == "off" for key in told["keys"]):
            assert json.loads(out.read_text()) == json.loads(path.read_text())
    assert len(rewritten) >= 5
    for name, outcome in outcomes_of(rewritten, tmp_path).items():
        assert outcome.startswith("trains"), f"{name}: {outcome}"


if __name__ == "__main__":
    import tempfile

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(_page(outcomes_of(FILES, Path(folder))))
    sys.stdout.write(f"written: {PAGE}\n")
