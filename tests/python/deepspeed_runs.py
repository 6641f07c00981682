"""Runs of real DeepSpeed on ranks of the CPU that save checkpoints and go on, for tests that read these."""

import argparse
import runpy
import shutil
import sys
import warnings

import numpy
import strata
import torch
from deepspeed_over_gloo import deepspeed_over_gloo
from ranks import run_ranks
from tiny_models import DTYPES, rank_and_world

WORLD = 2
STEPS = 3  # before the checkpoint, and after it
CASES = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]


class Model(torch.nn.Module):
    """Frozen, tied and odd-sized parameters, and buffers. Linear modules have no bias: DeepSpeed computes these with
    other roundings at stage 3."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.frozen = torch.nn.Linear(8, 7, bias=False)
        self.frozen.requires_grad_(False)
        self.shift = torch.nn.Parameter(torch.full((7,), 0.1))
        self.back = torch.nn.Linear(7, 8, bias=False)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("factor", torch.full((8,), 1.5))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.norm(self.back(self.frozen(self.embedding(tokens)) + self.shift).tanh()) * self.factor
        logits = self.head(hidden)[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def make_engine(library, stage, dtype, seed, accumulation=1):
    torch.manual_seed(seed)
    model = Model().to(DTYPES[dtype])
    groups = [{"params": [model.embedding.weight, model.norm.weight], "lr": 2e-2},
              {"params": [model.norm.bias, model.shift, model.back.weight], "weight_decay": 0.0}]  # fmt: skip
    adamw = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if library is not strata:
        adamw["torch_adam"] = True
    warmup = {"warmup_num_steps": 7, "warmup_max_lr": 2e-2, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype == "bf16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 8},
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    return library.initialize(model=model, model_parameters=groups, config=config)[0]


def losses_of(engine, steps, ranks):
    """The loss of each micro-batch of ``ranks``, in every step."""
    losses = []
    for step in steps:
        for rank in ranks:
            tokens = torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def client_state_of_script():
    return {"epoch": 3, "pair": (1, "x"), "rng": torch.arange(9, dtype=torch.uint8), "args": argparse.Namespace(lr=0.5),
            "array": numpy.arange(4.0), "number": numpy.float64(2.5)}  # fmt: skip


def train_with_deepspeed(folder):
    """By case: losses of this rank after the checkpoint, weights that DeepSpeed itself finds in it, and rates."""
    warnings.simplefilter("ignore")
    deepspeed = deepspeed_over_gloo()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed(dist_backend="gloo")
    rank, _ = rank_and_world()
    told = {}
    for stage, dtype in CASES:
        engine = make_engine(deepspeed, stage, dtype, seed=1)
        losses_of(engine, range(STEPS), [rank])
        path = f"{folder}/{stage}-{dtype}"
        engine.save_checkpoint(path, client_state=client_state_of_script())
        losses = losses_of(engine, range(STEPS, 2 * STEPS), [rank])
        weights = {}
        if (stage, dtype) != (1, "bf16"):  # which it refuses
            weights = {n: t.detach().float().numpy() for n, t in get_fp32_state_dict_from_zero_checkpoint(path).items()}
        told[stage, dtype] = (losses, weights, engine.get_lr())
        engine.destroy()
    if rank == 0:
        _give_a_loss_scale(f"{folder}/2-fp32", f"{folder}/scaled")
    return told


def _give_a_loss_scale(source, folder):
    """DeepSpeed does not train in fp16 on a CPU: its scaler of such a run is put into a copy."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    shutil.copytree(source, folder)
    path = f"{folder}/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    scaler = DynamicLossScaler(1024.0, scale_window=50, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
    scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 9, 4, 1
    content["optimizer_state_dict"]["loss_scaler"] = scaler
    torch.save(content, path)


def convert_to_universal(source, out):
    """DeepSpeed's own conversion of a checkpoint, by a process that has torch from the start."""
    run_ranks(1, _convert, ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1",
                            "--input_folder", str(source), "--output_folder", str(out)],
              env={"DS_ACCELERATOR": "cpu"})  # fmt: skip


def _convert(arguments):
    sys.argv = ["ds_to_universal.py", *arguments]
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
