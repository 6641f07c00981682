"""DeepSpeed as an independent reference: the same model, data and configuration on the same two ranks.

Losses and gradient norms of six steps, and the final weights, at stages 1, 2 and 3, clipping always active.
The model is given in the dtype of the run and gradients are reduced and kept in fp32, since DeepSpeed would
otherwise round buffers, the first master weights and the reduced gradients to bf16.
"""

import importlib
import os
import warnings

import pytest
import torch
from deepspeed_over_gloo import deepspeed_over_gloo
from devices import ON_GPU
from hf_models import MODELS, llama
from ranks import run_ranks

WORLD = 2
pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="compared with DeepSpeed on the CPU"),
    pytest.mark.xdist_group("against_deepspeed"),  # tests of this file share its runs
]
STEPS = 6
STAGES = (1, 2, 3)
LR = 1e-3

# Relative of losses, relative of norms, absolute of weights. Both engines run the same forward and backward on
# equal weights, so only roundings at the end of a step differ: the norm's sum in fp32 or fp64 (1e-7 of it), and
# fp32 roundings of AdamW, which move a weight whose gradient is nearly zero by a part of lr (measured: 2e-6). In
# bf16 such a difference is seen only where it tips a weight's rounding: 2^-8 of it, and some of the loss.
# Under autocast it is seen where it tips the rounding of a product.
# Where masters and moments are bf16, torch's AdamW, which DeepSpeed runs on them, rounds every operation.
TOLERANCES = {
    "fp32": (1e-6, 1e-6, 1e-2 * LR),
    "bf16": (1e-4, 1e-3, 2.0**-8),
    "autocast": (1e-4, 1e-3, LR),
    "rounded": (1e-3, 1e-2, 2.0**-7),
}


def _config(engine, stage, dtype):
    adamw = {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if engine == "deepspeed":
        adamw["torch_adam"] = True
    rounded = dtype == "rounded"
    states = {"bf16_master_weights_and_grads": rounded, "bf16_optimizer_states": rounded}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype in ("bf16", "rounded"), **states},
        # Nothing of DeepSpeed's travels in bf16.
        "torch_autocast": {"enabled": dtype == "autocast", "dtype": "bf16", "lower_precision_safe_modules": []},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "bf16" if rounded else "fp32"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": adamw},
    }


def _train(name, stage, dtype):
    """(losses of this rank, gradient norms, final weights) of one engine."""
    library = importlib.import_module(name)
    torch.manual_seed(20)
    model = llama().train().to(torch.bfloat16 if dtype in ("bf16", "rounded") else torch.float32)
    engine, *_ = library.initialize(
        model=model, model_parameters=list(model.parameters()), config=_config(name, stage, dtype)
    )
    rank = int(os.environ["RANK"])
    losses, norms = [], []
    for step in range(STEPS):
        batch = MODELS["llama"].batch(torch.Generator().manual_seed(1000 * step + rank), step, rank)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    with library.zero.GatheredParameters(list(model.parameters())):
        weights = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    engine.destroy()
    return losses, norms, weights


def _train_all(name):
    warnings.simplefilter("ignore")
    deepspeed_over_gloo(name).init_distributed(dist_backend="gloo")
    return {(stage, dtype): _train(name, stage, dtype) for dtype in TOLERANCES for stage in STAGES}


@pytest.fixture(scope="module")
def by_deepspeed():
    return run_ranks(WORLD, _train_all, "deepspeed", timeout=400.0, env={"DS_ACCELERATOR": "cpu"})


@pytest.fixture(scope="module")
def by_strata():
    return run_ranks(WORLD, _train_all, "strata", timeout=400.0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("stage", STAGES)
def test_losses_norms_and_weights_are_those_of_deepspeed(by_strata, by_deepspeed, stage, dtype):
    of_losses, of_norms, of_weights = TOLERANCES[dtype]
    for ours, theirs in zip(by_strata, by_deepspeed):
        losses, norms, weights = ours[stage, dtype]
        their_losses, their_norms, their_weights = theirs[stage, dtype]
        assert losses == pytest.approx(their_losses, rel=of_losses)
        assert norms == pytest.approx(their_norms, rel=of_norms)
        assert min(norms) > 0.5, "clipping must have been active"
        assert weights.keys() == their_weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, their_weights[name], rtol=0.0, atol=of_weights, msg=name)
