"""Jobs of ``StrataTrainer``, of Trainer over ``deepspeed``, and of plain Trainer for comparison.

    torchrun ... strata_trainer_jobs.py FOLDER NAME plain|strata|deepspeed CASE...

writes FOLDER/NAME.rank<n>.json: by case, losses of this rank's micro-batches, gradient norms, and the case's other
findings. FOLDER/model is a checkpoint of transformers, FOLDER/experts one with fused experts.
"""

import json
import os
import sys
import warnings

import strata
import torch
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from hf_jobs import MIDDLE, Recorder, Texts, arguments, new_model, prepared, zero
from peft import LoraConfig, get_peft_model
from strata.integrations.transformers import StrataTrainerMixin
from transformers import AutoModelForCausalLM


class StrataRecorder(StrataTrainerMixin, Recorder):
    """The mixin over a trainer that is not transformers' own."""


def arguments_of(kind, out, stage, **more):
    return arguments(out, zero(stage) if kind == "deepspeed" else None, **more)


def model_of(folder, case):
    """The model as the case trains it. After ``arguments_of``, which says whether it is built sharded."""
    if not case.startswith("experts"):
        return prepared(new_model(folder), case)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/experts", dtype=torch.float32)
    torch.manual_seed(3)
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=fused))


def trainer_of(kind, args, model, stage, **data):
    if kind != "strata":
        return Recorder(args=args, model=model, **data)
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    return StrataRecorder(args=args, model=model, strata_config=config, **data)


def total(values):
    """float: the sum of all sizes in an array, or in tuples of them."""
    if isinstance(values, tuple):
        return sum(total(value) for value in values)
    return torch.as_tensor(values).double().abs().sum().item()


def run(kind, folder, out, case):
    """Trains with evaluation, checkpoints and the best model; then predicts and generates."""
    told, stage = {}, int(case[-1])
    args = arguments_of(
        kind, out, stage, eval_strategy="steps", eval_steps=MIDDLE, save_strategy="steps", save_steps=MIDDLE,
        load_best_model_at_end=True, per_device_eval_batch_size=2, metric_for_best_model="eval_loss",
    )  # fmt: skip
    model = model_of(folder, case)
    data = {"train_dataset": Texts(96, 1), "eval_dataset": Texts(8, 2)}
    trainer = trainer_of(kind, args, model, stage, **data)
    if case.startswith("evaluated"):
        told["before"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    told["losses"], told["norms"] = trainer.losses, trainer.norms()
    told["rates"] = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    told["evaluated"] = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    told["best"] = os.path.basename(trainer.state.best_model_checkpoint)
    told["again"] = trainer.evaluate()["eval_loss"]
    told["predicted"] = total(trainer.predict(Texts(4, 3)).predictions)
    prompt = Texts(1, 4)[0]["input_ids"][None, :5]
    more = args.process_index  # ranks leave generate() at different times
    options = {"output_router_logits": False} if case.startswith("experts") else {}  # as in hf_models
    tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=6 + more, do_sample=False, **options)
    told["generated"] = tokens[0].tolist()
    trainer.save_model(f"{out}/final")
    if kind == "strata":
        weights = trainer.engine.module_state_dict()
        if args.process_index == 0:
            torch.save({name: value.clone() for name, value in weights.items()}, f"{out}/weights.pt")
    return told


def run_resumed(kind, folder, out, case):
    """Goes on from the checkpoint in the middle of ``run``."""
    stage = int(case[-1])
    args = arguments_of(kind, out, stage, save_strategy="no")
    trainer = trainer_of(kind, args, model_of(folder, case), stage, train_dataset=Texts(96, 1))
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{MIDDLE}")
    return {"resumed": trainer.losses}


def refusals(folder, out):
    """{error: its message}."""
    said = {}

    def attempt(name, config=None, **more):
        args = arguments(f"{out}-{name}", None, **more)
        try:
            StrataRecorder(args=args, model=new_model(folder), strata_config=config, train_dataset=Texts(8, 1))
        except strata.Error as error:
            said[name] = str(error)

    attempt("difference", {"train_micro_batch_size_per_gpu": 7, "gradient_clipping": 0.25})
    attempt("optimizer", {"optimizer": {"type": "AdamW"}})
    attempt("scheduler", {"scheduler": {"type": "WarmupLR"}})
    attempt("batch", auto_find_batch_size=True)
    attempt("cast", bf16_full_eval=True)
    attempt("parallelism", parallelism_config=ParallelismConfig())
    attempt("smoothing", {"strata": {"sequence_parallel": {"size": 2}}}, label_smoothing_factor=0.1)
    return said


def main(command):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    folder, name, kind, *cases = command
    told = {}
    for case in cases:
        transformers.set_seed(11)
        what, _, of = case.rpartition(":")
        if of == "refusals":
            told[of] = refusals(folder, f"{folder}/{name}-{of}")
        else:
            told[case] = (run_resumed if what else run)(kind, folder, f"{folder}/{name}-{of}", of)
        AcceleratorState._reset_state(reset_partial_state=False)
    with open(f"{folder}/{name}.rank{os.environ.get('RANK', '0')}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads end before the process does


if __name__ == "__main__":
    main(sys.argv[1:])
