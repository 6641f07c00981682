"""Lightning, LLaMA-Factory, axolotl and OpenRLHF, each in an environment of its own (tools/framework_environments.sh)
and by its own entry point, over ``deepspeed``: once DeepSpeed itself and once Strata in its place.

Two ranks take all steps, saving after half of them; other processes go on from there. Losses are DeepSpeed's.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import strata

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
STEPS, MIDDLE = 8, 4
# fp32 differs in the last bits of norms and updates. In bf16 DeepSpeed's stages 2 and 3 differ from each other by 4e-4
# in losses and by 6e-3 in norms.
RELATIVE = {"fp32": {"losses": 1e-5, "norms": 1e-5}, "bf16": {"losses": 1e-3, "norms": 1e-2}}


def has(framework):
    return (FOLDER / framework / "bin" / "python").exists()


def environment_of(framework, way):
    """That of a user of the framework's environment, in which Strata is installed; and offline, on the CPU."""
    found = {name: value for name, value in os.environ.items() if name not in ("STRATA_COMPAT", "RANK", "WORLD_SIZE")}
    more = {
        "PATH": f"{FOLDER / framework / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(strata.__file__).resolve().parents[1]) if way == "strata" else "",
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "torch_extensions"),  # what DeepSpeed compiles for its ranks of the CPU
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "AXOLOTL_DO_NOT_TRACK": "1",
        "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2",  # of LLaMA-Factory
    }  # fmt: skip
    return {**found, **RANKS_ON_THE_HOST, **more, **({"STRATA_COMPAT": "deepspeed"} if way == "strata" else {})}


def by_script(framework, folder, way, phase):
    """By case, the numbers of both ranks."""
    script = JOBS / f"{framework}_jobs.py"
    start = [FOLDER / framework / "bin" / "torchrun", "--standalone", "--nproc-per-node=2"]
    run([*start, script, folder, way, phase, *CASES[framework]], environment_of(framework, way), timeout=1200)
    ranks = told_by_ranks(folder, f"{way}-{phase}", 2)
    return {"version": ranks[0]["version"], **{case: [rank[case] for rank in ranks] for case in CASES[framework]}}


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
    """By case, what Trainer has logged of each step."""
    told = {"version": None}
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
        saved = folder / f"{way}-{phase}-{case}"
        assert list(saved.glob("*.safetensors")), f"{framework} saved no model in {saved}"
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


@pytest.fixture(scope="module", params=CASES)
def told(request, tmp_path_factory):
    """(the framework, DeepSpeed's numbers, those wanted of the second half, Strata's, and its of the second half)."""
    framework = request.param
    if not has(framework):
        pytest.skip(f"no environment of {framework}; make it with tools/framework_environments.sh")
    folder = tmp_path_factory.mktemp(framework)
    write_inputs(folder)
    job = by_script if (JOBS / f"{framework}_jobs.py").exists() else by_command
    theirs, ours = (job(framework, folder, way, "first") for way in ("deepspeed", "strata"))
    # Lightning's Trainer begins the data anew where it goes on within an epoch.
    again = job(framework, folder, "deepspeed", "resumed") if framework == "lightning" else None
    return framework, theirs, again, ours, job(framework, folder, "strata", "resumed")


@pytest.mark.parametrize("case", sorted({case for cases in CASES.values() for case in cases}))
def test_training_and_resuming_have_the_losses_of_deepspeed(told, case):
    framework, theirs, again, ours, resumed = told
    if case not in CASES[framework]:
        pytest.skip(f"no case of {framework}")
    relative = RELATIVE["bf16" if "bf16" in case else "fp32"]
    for rank, (their_rank, our_rank, resumed_rank) in enumerate(zip(theirs[case], ours[case], resumed[case])):
        for name, values in their_rank.items():
            assert len(set(values)) > 1, "nothing is learned"
            close = {"rel": relative[name], "abs": 0}
            wanted = again[case][rank][name] if again else values[len(values) // 2 :]
            assert our_rank[name] == pytest.approx(values, **close), name
            assert resumed_rank[name] == pytest.approx(wanted, **close), f"resumed {name}"
