"""Sixty and more architectures at tiny sizes: loaded from files, trained for three steps and saved at stages 2 and 3,
against plain transformers and torch."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

from many_models import MODELS, batch, build  # noqa: E402
from plain_torch import PlainTrainer  # noqa: E402
from ranks import run_ranks  # noqa: E402

import strata  # noqa: E402

WORLD, STEPS, LR = 2, 3, 1e-2


def _loss_of(name, step, rank):
    def loss_of(model):
        torch.manual_seed(100 + WORLD * step + rank)
        config = getattr(model, "module", model).config
        return model(**batch(MODELS[name], config, step, rank)).loss

    return loss_of


def _from_files(name, folder):
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).train()
    for as_built, parameter in zip(build(name).parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(as_built.requires_grad)  # from_pretrained forgets which parameters a constructor froze
    return model


def _train_plainly(name, folder, rank):
    plain = PlainTrainer(_from_files(name, folder), WORLD, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1))
    losses = []
    for step in range(STEPS):
        of_ranks = [_loss_of(name, step, r) for r in range(WORLD)]
        losses.append(plain.micro_step(of_ranks, lambda model, loss_of: loss_of(model))[rank])
        plain.step()
    return losses, plain.values()


def _same(folder, name, rank):
    """Loads, trains and saves one architecture; raises where something differs."""
    losses, weights = _train_plainly(name, folder / "start", rank)
    for stage in (2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            "strata": {"max_live_bytes": 1, "timeout_s": 60},
        }
        engine, *_ = strata.load_pretrained(folder / "start", config)
        engine.train()
        for step, expected in enumerate(losses):
            loss = _loss_of(name, step, rank)(engine)
            assert loss.item() == expected, (stage, step, loss.item(), expected)
            engine.backward(loss)
            engine.step()
        with strata.zero.GatheredParameters(list(engine.module.parameters())):
            ours = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        assert ours.keys() == weights.keys(), ours.keys() ^ weights.keys()
        for key, weight in weights.items():
            assert torch.equal(ours[key], weight), (stage, key, (ours[key] - weight).abs().max())
        saved = folder / str(stage)
        engine.save_pretrained(saved)
        torch.distributed.barrier()
        again = dict(_from_files(name, saved).named_parameters())
        for key, weight in ours.items():
            assert torch.equal(again[key], weight), (stage, "saved", key)
        engine.destroy()


def _run(root, name):
    warnings.simplefilter("ignore")
    strata.init_distributed()
    _same(root, name, int(os.environ["RANK"]))


@pytest.mark.parametrize("name", MODELS)
def test_loads_trains_and_saves_as_plain_torch(name, tmp_path):
    build(name).save_pretrained(tmp_path / "start")
    run_ranks(WORLD, _run, tmp_path, name)
