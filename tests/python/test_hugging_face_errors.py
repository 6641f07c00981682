"""Errors over the stand-in keep the message of the library that found them: Trainer's, Accelerate's or PEFT's."""

import sys

import pytest
import torch
from devices import ON_GPU
from hf_models import llama
from launching import environment_of, run
from ranks import free_port

pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="says the same on the CPU"),
]

SCRIPT = """
import strata.compat.deepspeed
import os, sys, torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments

folder = sys.argv[1]

def config(**more):
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **more}

def arguments(**more):
    return TrainingArguments(folder + "/out", deepspeed=config(**more), use_cpu=True, report_to=[], max_steps=1,
                             per_device_train_batch_size=1, disable_tqdm=True)

def model():
    return AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32)

def trained(resume=None, **more):
    args = arguments(**more)
    Trainer(args=args, model=model(), train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 8).train(resume)

def disagreement():
    trained(optimizer={"type": "AdamW", "params": {"lr": 0.5}})

def both_precisions():
    trained(bf16={"enabled": True}, fp16={"enabled": True})

def two_schedulers():
    prepared(torch.optim.lr_scheduler.LambdaLR)

def prepared(make_scheduler):
    plugin = DeepSpeedPlugin(hf_ds_config=config(scheduler={"type": "WarmupLR", "params": {}}))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    accelerator.prepare(own, optimizer, make_scheduler(optimizer, lambda step: 1.0))

def misspelled():
    args = arguments(zero_optimisation={"stage": 3})
    Trainer(args=args, model=model(), train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 8).train()

def no_such_module():
    alive = arguments()
    get_peft_model(model(), LoraConfig(target_modules=["nowhere"]))

def checkpoint_of_deepspeed():
    os.makedirs(folder + "/theirs/global_step1", exist_ok=True)
    with open(folder + "/theirs/latest", "w") as file:
        file.write("global_step1")
    for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({}, folder + "/theirs/global_step1/" + name)
    state = TrainerState(global_step=1, max_steps=2, train_batch_size=1, save_steps=500, num_train_epochs=1)
    state.save_to_json(folder + "/theirs/trainer_state.json")
    trained(folder + "/theirs")

def unresolved():
    plugin = DeepSpeedPlugin(hf_ds_config=config(optimizer={"type": "AdamW", "params": {"lr": "auto"}}))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    accelerator.prepare(model())

def never_filled():
    import deepspeed

    own = model()
    deepspeed.initialize(model=own, config=config(optimizer={"type": "AdamW", "params": {"lr": "auto"}}))

CASES = (disagreement, both_precisions, two_schedulers, unresolved, never_filled, misspelled, no_such_module,
         checkpoint_of_deepspeed)
for case in CASES:
    try:
        case()
        print(f"<{case.__name__}> nothing was raised", flush=True)
    except Exception as error:
        print(f"<{case.__name__}> {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    AcceleratorState._reset_state(reset_partial_state=True)
"""

SAID = {
    "disagreement": ["ValueError", "Please correct the following DeepSpeed config values", "optimizer.params.lr=0.5"],
    "both_precisions": ["ConfigError", "bf16"],
    "two_schedulers": ["ValueError", "You cannot specify a scheduler in the config file and in the code"],
    "unresolved": ["optimizer.params.lr", "auto"],
    "never_filled": ["ConfigError", "optimizer.params.lr", "auto"],
    "misspelled": ["ConfigError", "zero_optimisation", "zero_optimization"],
    "no_such_module": ["Target modules {'nowhere'} not found in the base model"],
    "checkpoint_of_deepspeed": ["is a checkpoint of DeepSpeed", "strata import-deepspeed"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    torch.manual_seed(0)
    llama().save_pretrained(folder / "model")
    (folder / "script.py").write_text(SCRIPT)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as from a launcher, which would import torch, too
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    text = run([sys.executable, folder / "script.py", folder], environment_of(**alone, **place))
    return {name: text.partition(f"<{name}>")[2].partition("\n")[0] for name in SAID}


@pytest.mark.parametrize("case", SAID)
def test_the_error_says_what_to_do(said, case):
    for words in SAID[case]:
        assert words in said[case]
