"""Makes the files beside it: states of 8 bits after two steps of bitsandbytes 0.50 and torchao 0.18 on a CPU, and the
weights after a third one. Needs both libraries, which tests that read the files do not. ``python make.py``"""

import os
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROWS, COLUMNS = 64, 68  # 17 blocks of 256 elements
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}


def make_linear():
    """The model: a weight whose states have 8 bits, and a bias."""
    linear = torch.nn.Linear(COLUMNS, ROWS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return linear


def gradients_of(step):
    """[gradient of the weight, of the bias], of magnitudes over four decades."""
    generator = torch.Generator().manual_seed(100 + step)
    shapes = ((ROWS, COLUMNS), (ROWS,))
    return [torch.randn(shape, generator=generator) * 10 ** (-4 * torch.rand(shape, generator=generator))
            for shape in shapes]  # fmt: skip


def take_step(model, optimizer, step):
    for parameter, gradient in zip(model.parameters(), gradients_of(step)):
        parameter.grad = gradient
    optimizer.step()


def _trained(make):
    model = make_linear()
    optimizer = make(model.parameters())
    for step in range(2):
        take_step(model, optimizer, step)
    return model, optimizer


def _copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _save(name, make):
    model, optimizer = _trained(make)
    before, state = _copied(model), optimizer.state_dict()
    torch.save({"model": before, "optimizer": state}, HERE / f"{name}.pt")
    take_step(model, optimizer, 2)
    torch.save(_copied(model), HERE / f"{name}-next.pt")


def _save_dcp(name, make):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _trained(make)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=HERE / f"{name}-dcp")


def main():
    import torch._dynamo
    from bitsandbytes.optim import AdamW8bit, Lion8bit
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    makers = {"bitsandbytes-adamw": lambda p: AdamW8bit(p, **SETTINGS),
              "bitsandbytes-lion": lambda p: Lion8bit(p, **LION),
              "torchao-adamw": lambda p: TorchaoAdamW8bit(p, **{**SETTINGS, "lr": torch.tensor(1e-3)})}  # fmt: skip
    for name, make in makers.items():
        _save(name, make)
    for name in ("bitsandbytes-adamw", "torchao-adamw"):
        try:
            _save_dcp(name, makers[name])
        except Exception as error:
            print("no DCP of", name, repr(error))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
