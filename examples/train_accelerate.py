"""Trains a small model with Accelerate's own loop at ZeRO stage 3; the first import puts Strata in DeepSpeed's place.

    torchrun --nproc-per-node 2 examples/train_accelerate.py [--config examples/ds_config.json] [--steps 40]
"""

import strata.compat.deepspeed  # isort: skip  # before transformers and accelerate

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from library_text import LibraryText, model_config, sample
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/ds_config.json", help="DeepSpeed JSON with an optimizer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="demo_out/accelerate")
    arguments = parser.parse_args()
    on_host = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=arguments.config), kwargs_handlers=on_host)
    batch = accelerator.deepspeed_plugin.get_value("train_micro_batch_size_per_gpu")
    model = AutoModelForCausalLM.from_config(model_config())
    loader = torch.utils.data.DataLoader(LibraryText(64), batch_size=batch, shuffle=True)
    optimizer = DummyOptim(model.parameters())
    scheduler = DummyScheduler(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    done = 0
    while done < arguments.steps:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(**tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == arguments.steps:
                break
    mean = accelerator.gather(loss.detach()).mean().item()
    text = sample(accelerator.unwrap_model(model).eval())
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    accelerator.print(f"step {done}: loss {mean:.3f} nats a byte; it writes {text!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
