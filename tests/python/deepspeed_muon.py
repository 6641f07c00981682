"""Real DeepSpeed that trains Muon on ranks of the CPU, for tests that import its checkpoints."""

import warnings

import torch
from deepspeed_over_gloo import deepspeed_over_gloo
from tiny_models import DTYPES, rank_and_world

WORLD = 2
STEPS = 3  # before the checkpoint; one more comes after it
# (stage, dtype, whether states are offloaded). DeepSpeed trains stage 1 in bf16 by another class, BF16_Optimizer.
CASES = [(1, "fp32", False), (1, "bf16", False), (2, "bf16", False), (2, "fp32", True), (3, "bf16", False)]
ENV = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
PARAMS = {"lr": 0.02, "adam_lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}


class Model(torch.nn.Module):
    """Matrices whose elements lie on two ranks, and parameters of Adam."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in ((8, 7), (7, 15), (15, 8)))
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 13, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.lm_head(self.norm(hidden))[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def name_of(case):
    stage, dtype, offloaded = case
    return f"{stage}-{dtype}{'-offloaded' if offloaded else ''}"


def make_engine(library, case, seed=1, accumulation=1, change=lambda model: None):
    stage, dtype, offloaded = case
    torch.manual_seed(seed)
    model = Model().to(DTYPES[dtype])
    change(model)
    of_deepspeed = {"ns_method": "standard", "torch_adam": True} if library.__name__ == "deepspeed" else {}
    zero = {"stage": stage, "reduce_scatter": False, "stage3_param_persistence_threshold": 0, "sub_group_size": 60}
    if offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"} if stage != 2 else {},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "Muon", "params": {**PARAMS, **of_deepspeed}},
    }
    return library.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch_of(step, rank):
    return torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def train_step(engine, step, ranks):
    """[loss of each micro-batch]."""
    losses = []
    for rank in ranks:
        loss = engine(batch_of(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_with_deepspeed(folder):
    """By case: {(state, parameter): values} at the checkpoint, of the matrices that this rank has, and the loss of the
    two steps after it."""
    warnings.simplefilter("ignore")
    deepspeed = deepspeed_over_gloo()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, _ = rank_and_world()
    told = {}
    for case in CASES:
        engine = make_engine(deepspeed, case)
        for step in range(STEPS):
            train_step(engine, step, [rank])
        engine.save_checkpoint(f"{folder}/{name_of(case)}")
        states = _states(engine)
        losses = [train_step(engine, step, [rank])[0] for step in range(STEPS, STEPS + 2)]
        told[case] = states, losses, type(engine.optimizer).__name__
        engine.destroy()
    return told


def go_on_with_deepspeed(folder, cases):
    """By case: losses of this rank after the checkpoints that DeepSpeed loads."""
    warnings.simplefilter("ignore")
    deepspeed = deepspeed_over_gloo()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, _ = rank_and_world()
    told = {}
    for case in cases:
        engine = make_engine(deepspeed, case, seed=7)
        path, _ = engine.load_checkpoint(f"{folder}/{name_of(case)}")
        assert path is not None
        told[case] = [train_step(engine, step, [rank])[0] for step in range(STEPS, STEPS + 2)]
        engine.destroy()
    return told


def _states(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found, zero = {}, engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        found["value", name] = safe_get_full_fp32_param(parameter).float()
        if hasattr(parameter, "ds_id"):
            for state in ("momentum_buffer",) if parameter.use_muon else ("exp_avg", "exp_avg_sq"):
                found[state, name] = safe_get_full_optimizer_state(parameter, state)
    groups = getattr(zero, "bit16_groups", getattr(zero, "bf16_groups", []))
    for group, members in enumerate(groups):  # of stages 1 and 2
        for state, flat in zero.optimizer.state[zero.optimizer.param_groups[group]["params"][0]].items():
            if state == "momentum_buffer" and hasattr(zero, "params_in_partition") and not zero.cpu_offload:
                # It has all elements of each tensor that the partition has a part of.
                parts, there = flat, zero.params_in_partition[group]
            elif flat.dim() > 0:
                of_ranks = [torch.empty_like(flat) for _ in range(WORLD)]
                torch.distributed.all_gather(of_ranks, flat)
                parts, there = torch.cat(of_ranks), members
            else:
                continue
            for parameter, values in zip(there, parts.split([p.numel() for p in there] + [len(parts) - sum(
                    p.numel() for p in there)])):  # fmt: skip
                found[state, names[id(parameter)]] = values.view_as(parameter)
    return {key: value.detach().float().clone().numpy() for key, value in found.items()}
