"""Jobs of Trainer and of TRL's SFT with LoRA, with torch.compile and without: of ``StrataTrainer``, or over the
``deepspeed`` of this process.

    torchrun ... compiled_jobs.py FOLDER NAME strata|deepspeed CASE...

writes FOLDER/NAME.rank<n>.json: by case, losses of micro-batches, gradient norms, graphs, breaks, and how many modules
are compiled. FOLDER/model is a checkpoint of transformers. A case is "trainer" or "sft", alone, or with the way of
compiling: "-argument" (``torch_compile_backend``), "-environment" (as ``accelerate launch --dynamo_backend`` sets it)
or "-regional" (and ``--dynamo_use_regional_compilation``)."""

import json
import os
import sys
import warnings

import torch
import transformers
from accelerate.state import AcceleratorState
from hf_jobs import Texts, new_model
from strata_trainer_jobs import arguments_of, trainer_of

BACKEND, STEPS = "aot_eager", 3
_ENVIRONMENT = {
    "environment": {"ACCELERATE_DYNAMO_BACKEND": BACKEND},
    "regional": {"ACCELERATE_DYNAMO_BACKEND": BACKEND, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
}


def _trainer(kind, folder, out, way):
    more = {"torch_compile_backend": BACKEND} if way == "argument" else {}
    args = arguments_of(kind, out, 3, save_strategy="no", **more)
    return trainer_of(kind, args, new_model(folder), 3, train_dataset=Texts(96, 1))


def _sft(kind, folder, out):
    import trl_jobs  # only where TRL is installed
    from peft import LoraConfig

    tokenizer, path = trl_jobs.byte_tokenizer(), f"{folder}/sft-{os.environ['RANK']}"
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return trl_jobs.trainer_of(kind, "sft", path, tokenizer, adapter, out)


def run(kind, folder, out, case):
    what, _, way = case.partition("-")
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]
    os.environ.update(_ENVIRONMENT.get(way, {}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = _sft(kind, folder, out) if what == "sft" else _trainer(kind, folder, out, way)
    trainer.args.max_steps = STEPS
    trainer.train()
    model = trainer.model
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": getattr(trainer, "losses", None) or [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "breaks": list(torch._dynamo.utils.counters["graph_break"]),
        "compiled": sum(module._compiled_call_impl is not None for module in model.modules()),
    }


def main(command):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    folder, name, kind, *cases = command
    told = {}
    if any(case.startswith("sft") for case in cases):
        import trl_jobs

        # Each rank writes, as none of them is connected to others yet.
        trl_jobs.save_model(f"{folder}/sft-{os.environ['RANK']}", trl_jobs.byte_tokenizer())
    for case in cases:
        transformers.set_seed(11)
        told[case] = run(kind, folder, f"{folder}/{name}-{case}-{os.environ.get('RANK', '0')}", case)
        AcceleratorState._reset_state(reset_partial_state=False)
    with open(f"{folder}/{name}.rank{os.environ.get('RANK', '0')}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads end before the process does


if __name__ == "__main__":
    main(sys.argv[1:])
