"""Frameworks that compile: ``torch_compile`` of Trainer's arguments, accelerate's settings, its regional compilation,
and TRL's SFT with LoRA, by ``StrataTrainer`` and under DeepSpeed's name. Numbers are those without compiling."""

from pathlib import Path

import pytest
import torch
from devices import ON_GPU
from hf_models import llama
from launching import environment_of, forked, run, told_by_ranks, torchrun

pytestmark = [
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.skipif(ON_GPU, reason="the bits of two kinds of kernels differ"),
]
SCRIPT = Path(__file__).with_name("compiled_jobs.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled")
    torch.manual_seed(0)
    llama().save_pretrained(path / "model")
    return path


def _check(told, plain, cases, known=None):
    """``cases``: {name: graphs}; ``known``: what a break of the framework's own says, or None."""
    for of_rank in told:
        assert of_rank[plain]["graphs"] == of_rank[plain]["compiled"] == 0
        for case, graphs in cases.items():
            found = of_rank[case]
            assert found["losses"] == of_rank[plain]["losses"] and found["norms"] == of_rank[plain]["norms"], case
            assert len(found["losses"]) > 1 and found["compiled"] > 1, case
            assert found["graphs"] == graphs, (case, found["graphs"])
            assert all(known is not None and known in reason for reason in found["breaks"]), (case, found["breaks"])


def test_trainer_with_strata_compiles_blocks(folder):
    from compiled_jobs import main

    told = forked(2, main, folder, "strata", "strata", "trainer", "trainer-argument")
    _check(told, "trainer", {"trainer-argument": 2})  # a block, and the norm outside


@pytest.mark.soak
def test_sft_with_lora_compiles_blocks(folder):
    pytest.importorskip("trl")
    from compiled_jobs import main

    told = forked(2, main, folder, "sft", "strata", "sft", "sft-environment")
    _check(told, "sft", {"sft-environment": 2})  # a block, whose input needs a gradient since TRL checkpoints; the norm


@pytest.mark.soak
def test_frameworks_compile_under_deepspeeds_name(folder):
    pytest.importorskip("trl")
    cases = ["trainer", "trainer-argument", "trainer-environment", "trainer-regional", "sft", "sft-environment",
             "sft-regional"]  # fmt: skip
    run([*torchrun(2), "-m", "strata.compat.run", SCRIPT, folder, "place", "deepspeed", *cases], environment_of())
    told = told_by_ranks(folder, "place", 2)
    _check(told, "trainer", {"trainer-argument": 2, "trainer-environment": 2, "trainer-regional": 3})
    # TRL asks for reentrant checkpointing here, whose first forward is a graph of its own.
    _check(told, "sft", {"sft-environment": 3})
    _check(told, "sft", {"sft-regional": 4}, "requires_grad_()")  # a hook of TRL on the embedding, which is compiled
