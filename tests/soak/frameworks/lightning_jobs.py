"""Lightning's Trainer and Fabric over DeepSpeedStrategy, under the ``deepspeed`` of this process.

    torchrun ... lightning_jobs.py FOLDER NAME first|resumed CASE...

writes FOLDER/NAME-<phase>.rank<n>.json: by case (trainer-3) the losses of this rank's micro-batches. ``first`` takes
all steps and saves a checkpoint after half of them; ``resumed`` goes on from it.
"""

import json
import os
import sys
import warnings

import lightning
import lightning.fabric.accelerators
import lightning.fabric.strategies
import lightning.pytorch.accelerators
import lightning.pytorch.strategies
import torch
from torch import nn

STEPS, MIDDLE, WIDTH = 8, 4, 24
GIVEN = {"offload_optimizer": False, "offload_parameters": False, "logging_batch_size_per_gpu": 4}


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(8 * STEPS, WIDTH, generator=generator)
        self._wanted = torch.tanh(self._inputs.cumsum(1))

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        return self._inputs[index], self._wanted[index]


def loader():
    return torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=False)


def network():
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, WIDTH))


def on_the_host(cuda):
    """A subclass of Lightning's accelerator ``cuda``, since DeepSpeedStrategy takes no other, on the CPU."""

    class Host(cuda):
        def setup_device(self, device):
            pass

        def setup(self, trainer):
            pass

        def teardown(self):
            pass

        @staticmethod
        def parse_devices(devices):
            return list(range(devices))

        @staticmethod
        def get_parallel_devices(devices):
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def is_available():
            return True

    return Host()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []

    def configure_model(self):
        if not hasattr(self, "body"):
            self.body = network()

    def training_step(self, batch, _):
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.body(inputs), wanted)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


def with_trainer(stage, folder, resumed):
    """Losses of the Trainer: accumulation of 2, clipping, a scheduler."""
    lightning.seed_everything(11)
    strategy = lightning.pytorch.strategies.DeepSpeedStrategy(stage=stage, process_group_backend="gloo", **GIVEN)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=MIDDLE // 2, save_top_k=-1, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator=on_the_host(lightning.pytorch.accelerators.CUDAAccelerator), strategy=strategy, devices=2,
        max_steps=STEPS // 2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[keep], logger=False,
        enable_progress_bar=False, precision="32-true",
    )  # fmt: skip
    module = Module()
    saved = os.path.join(folder, f"step={MIDDLE // 2}.ckpt") if resumed else None
    trainer.fit(module, loader(), ckpt_path=saved)
    return module.losses


def with_fabric(stage, folder, resumed):
    """Losses of a loop over Fabric, which asks the optimizer to step."""
    strategy = lightning.fabric.strategies.DeepSpeedStrategy(stage=stage, process_group_backend="gloo", **GIVEN)
    accelerator = on_the_host(lightning.fabric.accelerators.CUDAAccelerator)
    fabric = lightning.Fabric(accelerator=accelerator, strategy=strategy, devices=2, precision="32-true")
    fabric.launch()
    fabric.seed_everything(11)
    with fabric.init_module():
        model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resumed:
        fabric.load(os.path.join(folder, "middle"), state)
        assert state["step"] == MIDDLE, state["step"]
    losses = []
    for index, (inputs, wanted) in enumerate(fabric.setup_dataloaders(loader())):
        if index < state["step"]:
            continue
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        state["step"] += 1
        if state["step"] == MIDDLE and not resumed:
            fabric.save(os.path.join(folder, "middle"), state)
    return losses


def main(folder, name, phase, *cases):
    warnings.simplefilter("ignore")
    told = {}
    for case in cases:
        kind, _, stage = case.partition("-")
        train = {"trainer": with_trainer, "fabric": with_fabric}[kind]
        losses = train(int(stage), f"{folder}/{name}-{case}", phase == "resumed")
        told[case] = {"losses": losses}
    with open(f"{folder}/{name}-{phase}.rank{os.environ['RANK']}.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
    torch.distributed.destroy_process_group()  # whose threads, where DeepSpeed leaves them, may abort the process


if __name__ == "__main__":
    main(*sys.argv[1:])
