"""Lightning, LLaMA-Factory, axolotl and OpenRLHF, each in an environment of its own (tools/framework_environments.sh)
and by its own entry point, over ``deepspeed``: once DeepSpeed itself and once Strata in its place.

Two ranks take all steps, saving after half of them; other processes go on from there. Losses and the models that are
saved are DeepSpeed's.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import strata
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "python"))

from launching import RANKS_ON_THE_HOST, run, told_by_ranks  # noqa: E402

pytest.importorskip("trl")
FOLDER = Path(os.environ.get("STRATA_FRAMEWORKS") or TESTS.parent / "build" / "frameworks")
JOBS = TESTS / "soak" / "frameworks"
CASES = {
    "lightning": ["trainer-2", "trainer-3", "fabric-2", "fabric-3"],
    "openrlhf": ["fp32-2", "fp32-3", "bf16-2", "bf16-3"],
    "llamafactory": ["full-2", "full-3"],
    "axolotl": ["full-2", "full-3"],
}
JOBS_OF = dict.fromkeys(CASES, ["deepspeed-first", "strata-first", "strata-resumed"])
JOBS_OF["lightning"] = [*JOBS_OF["lightning"], "deepspeed-resumed"]
SAVED = {  # where the trained model is
    "openrlhf": "{way}-{case}-model", "llamafactory": "{way}-{phase}-{case}", "axolotl": "{way}-{phase}-{case}",
}  # fmt: skip
STEPS, MIDDLE = 8, 4
# fp32 differs in the last bits of norms and updates. In bf16 DeepSpeed's stages 2 and 3 differ from each other by 4e-4
# in losses, by 6e-3 in norms and by 1.02e-2 in weights.
RELATIVE = {
    "fp32": {"losses": 1e-5, "norms": 1e-5, "weights": 1e-5},
    "bf16": {"losses": 1e-3, "norms": 1e-2, "weights": 1.02e-2},
}


def environment_of(framework, way):
    """The environment of a user of the framework, in which Strata is installed; offline, on the CPU."""
    found = {name: value for name, value in os.environ.items() if name not in ("STRATA_COMPAT", "RANK", "WORLD_SIZE")}
    more = {
        "PATH": f"{FOLDER / framework / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(strata.__file__).absolute().parents[1]) if way == "strata" else "",  # links, in a build
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "torch_extensions"),  # DeepSpeed compiles these for its ranks of the CPU
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "AXOLOTL_DO_NOT_TRACK": "1",
        "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2",  # of LLaMA-Factory
    }  # fmt: skip
    return {**found, **RANKS_ON_THE_HOST, **more, **({"STRATA_COMPAT": "deepspeed"} if way == "strata" else {})}


def by_script(framework, folder, way, phase):
    """Trains every case; by case, the numbers of both ranks."""
    script = JOBS / f"{framework}_jobs.py"
    start = [FOLDER / framework / "bin" / "torchrun", "--standalone", "--nproc-per-node=2"]
    run([*start, script, folder, way, phase, *CASES[framework]], environment_of(framework, way), timeout=1200)
    ranks = told_by_ranks(folder, f"{way}-{phase}", 2)
    return {case: [rank[case] for rank in ranks] for case in CASES[framework]}


COMMON = {  # of the YAML files of LLaMA-Factory and of axolotl
    "gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": MIDDLE, "logging_steps": 1,
    "learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 0.5, "bf16": False, "seed": 7,
}  # fmt: skip
LLAMAFACTORY = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset_dir": ".",
    "dataset": "texts", "template": "empty", "cutoff_len": 64, "per_device_train_batch_size": 2, "report_to": "none",
    "lr_scheduler_type": "cosine", "overwrite_cache": True, "flash_attn": "disabled", "dataloader_num_workers": 0,
}  # fmt: skip
AXOLOTL = {
    "base_model": "model", "datasets": [{"path": "texts.json", "ds_type": "json", "type": "alpaca"}],
    "val_set_size": 0, "sequence_len": 512, "pad_to_sequence_len": False, "sample_packing": False,
    "micro_batch_size": 2, "lr_scheduler": "cosine", "optimizer": "adamw_torch", "fp16": False, "tf32": False,
    "attn_implementation": "eager", "special_tokens": {"pad_token": "<pad>"}, "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
}  # fmt: skip
COMMANDS = {
    "llamafactory": ["llamafactory-cli", "train"],
    "axolotl": ["torchrun", "--standalone", "--nproc-per-node=2", JOBS / "axolotl_train.py"],
}


def by_command(framework, folder, way, phase):
    """Trains every case; returns Trainer's log of each step, by case."""
    told = {}
    for case in CASES[framework]:
        out, first = folder / f"{way}-{phase}-{case}", folder / f"{way}-first-{case}"
        given = {"output_dir": out.name, "deepspeed": f"ds{case[-1]}.json", **COMMON}
        given.update({"llamafactory": LLAMAFACTORY, "axolotl": AXOLOTL}[framework])
        if framework == "axolotl":
            given["dataset_prepared_path"] = f"{out.name}-data"
        if phase == "resumed":
            given["resume_from_checkpoint"] = str(first / f"checkpoint-{MIDDLE}")
        (folder / f"{out.name}.yaml").write_text(json.dumps(given))  # which is YAML
        program = FOLDER / framework / "bin" / COMMANDS[framework][0]
        command = [program, *COMMANDS[framework][1:], f"{out.name}.yaml"]
        run(["env", "-C", folder, *command], environment_of(framework, way), timeout=600)
        state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        steps = [entry for entry in state["log_history"] if "grad_norm" in entry]
        steps = steps[-MIDDLE:] if phase == "resumed" else steps
        told[case] = [{"losses": [s["loss"] for s in steps], "norms": [s["grad_norm"] for s in steps]}]
    return told


def write_inputs(folder):
    """A model of two layers, texts, and configurations as LLaMA-Factory ships them."""
    from trl_jobs import LINES, byte_tokenizer, save_model

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    save_model(folder / "model", tokenizer)
    texts = [{"instruction": t[:8], "input": "", "output": t[8:]} for t in LINES]
    texts += [{"instruction": t[3:12], "input": "", "output": t[::-1]} for t in LINES]
    (folder / "texts.json").write_text(json.dumps(texts))
    (folder / "dataset_info.json").write_text(json.dumps({"texts": {"file_name": "texts.json"}}))
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    for stage in (2, 3):
        zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
        if stage == 3:
            names = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
            zero.update(dict.fromkeys(names, "auto"), stage3_gather_16bit_weights_on_model_save=True)
        config = {**dict.fromkeys(auto, "auto"), "zero_allow_untested_optimizer": True, "zero_optimization": zero}
        (folder / f"ds{stage}.json").write_text(json.dumps(config))


def weights_in(folder):
    """{name: tensor} of the model that is saved there."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def greatest_difference(found, wanted):
    """The greatest relative difference between two lists of numbers."""
    assert len(found) == len(wanted) > 0 and len(set(wanted)) > 1, "nothing is learned"
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted))


def greatest_distance(found, wanted):
    """The greatest relative distance between two tensors of the same name."""
    kinds = [{name: (value.shape, value.dtype) for name, value in them.items()} for them in (found, wanted)]
    assert kinds[0] == kinds[1]
    return max(((found[n] - w).double().norm() / w.double().norm()).item() for n, w in wanted.items())


def differences(framework, folder, case):
    """The comparisons of one case: [(name, greatest difference from DeepSpeed, allowed difference)]."""
    told = {job: json.loads((folder / f"{job}.json").read_text())[case] for job in JOBS_OF[framework]}
    allowed = RELATIVE["bf16" if "bf16" in case else "fp32"]
    for rank, theirs in enumerate(told["deepspeed-first"]):
        for name, values in theirs.items():
            found = told["strata-first"][rank][name], told["strata-resumed"][rank][name]
            # Lightning's Trainer begins the data anew where it goes on within an epoch.
            again = told["deepspeed-resumed"][rank][name] if "deepspeed-resumed" in told else values[len(values) // 2 :]
            for way, ours, wanted in zip(("", "resumed "), found, (values, again)):
                yield f"{way}{name} of rank {rank}", greatest_difference(ours, wanted), allowed[name]
    for phase in ("first", "resumed") if framework in SAVED else ():
        ours, theirs = (weights_in(folder / SAVED[framework].format(way=way, phase=of, case=case))
                        for way, of in (("strata", phase), ("deepspeed", "first")))  # fmt: skip
        yield f"{phase} model", greatest_distance(ours, theirs), allowed["weights"]


def is_of_strata(folder, way, case):
    """Whether its checkpoints are Strata's."""
    return any(list(saved.rglob("manifest.json")) for saved in folder.glob(f"{way}-*{case}"))


@pytest.mark.parametrize("framework", CASES)
def test_training_saving_and_resuming_are_those_of_deepspeed(framework, tmp_path):
    if not (FOLDER / framework / "bin" / "python").exists():
        pytest.skip(f"no environment of {framework}; make it with tools/framework_environments.sh")
    write_inputs(tmp_path)
    train = by_script if (JOBS / f"{framework}_jobs.py").exists() else by_command
    for job in JOBS_OF[framework]:
        told = train(framework, tmp_path, *job.split("-"))
        (tmp_path / f"{job}.json").write_text(json.dumps(told))
    for case in CASES[framework]:
        assert [is_of_strata(tmp_path, way, case) for way in ("deepspeed", "strata")] == [False, True]
        compared = list(differences(framework, tmp_path, case))
        print(case, *(f"{what} {found:.1e}" for what, found, _ in compared), sep=", ")
        assert [one for one in compared if not one[1] <= one[2]] == [], case
