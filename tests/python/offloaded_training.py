"""A small model whose weights and optimizer states rest elsewhere, trained for tests to compare."""

import pytest
import torch
from devices import shares_a_gpu
from ranks import run_ranks

import strata


def run_gathering_together(world, *arguments):
    """Gathers of offloaded weights are NCCL's on GPUs, which wants one for each rank."""
    if world > 1 and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    run_ranks(world, *arguments)


def config_of(place, folder, stage, dtype="bf16", **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "strata": {"state_cache": 0},  # what rests on the device is what the forecast says
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {
                "device": place,
                "nvme_path": str(folder),
                "buffer_count": 2,
                "buffer_size": 200_000,
                "pin_memory": True,
            },
        },
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config | more


def all_offloaded(param, states, folder, dtype="bf16", **zero):
    """Stage 3 with weights and states offloaded; no parameter is small enough to stay whole."""
    config = config_of(states, folder, 3, dtype)
    config["zero_optimization"] |= {
        "offload_param": {
            "device": param, "nvme_path": str(folder), "buffer_count": 2, "buffer_size": 300_000, "pin_memory": True,
        },
        "stage3_param_persistence_threshold": 0,
    } | zero
    return config


def make_model(rows=30_000):
    """A model that has by default more states on each of three ranks than the smallest staging memory."""
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Embedding(rows, 48), torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 40)
    )


def train_steps(engine, steps, first=0):
    losses = []
    for micro in range(2 * first, 2 * (first + steps)):
        torch.manual_seed(100 + micro)
        ids, target = torch.randint(0, 3000, (2, 12)), torch.randint(0, 40, (2, 12))
        target = target.to(engine.device)
        loss = torch.nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), target.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_weights(engine):
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().float().cpu().clone() for p in engine.module.parameters()]


def whole_states(engine):
    get = strata.utils.safe_get_full_optimizer_state
    return [get(p, kind).cpu() for p in engine.module.parameters() for kind in ("exp_avg", "exp_avg_sq")]
