"""Embeddings made with sparse=True train as dense ones do, which is said once."""

import warnings

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiny_models import DTYPES, TinyModel, config_of, differences, full_parameters, loss_of, make_batches, make_engine
from tiny_models import make_model, rank_and_world, train_step
from torch import nn


class Sparse(TinyModel):
    def __init__(self, sparse=True):
        super().__init__()
        self.embedding = nn.Embedding(11, 16, sparse=sparse)
        self.bag = nn.EmbeddingBag(11, 16, mode="sum", sparse=sparse)

    def forward(self, tokens):
        return super().forward(tokens) + self.bag(tokens).mean()


def _trains():
    rank, world = rank_and_world()
    tokens = make_batches(4, world)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for stage in range(4):
            for dtype, accumulation in (("fp32", 2), ("bf16", 1)):
                dense = make_model(Sparse, sparse=False)
                reference = PlainTrainer(dense, world, adamw, DTYPES[dtype], accumulation=accumulation)
                engine = make_engine(make_model(Sparse), config_of(stage, dtype, accumulation, sparse_gradients=True))
                for step in range(4):
                    reference.micro_step(tokens[step], loss_of)
                    train_step(engine, tokens[step][rank])
                    if (step + 1) % accumulation == 0:
                        reference.step()
                ours, theirs = full_parameters(engine.module), reference.values()
                if dtype == "fp32":
                    assert differences(ours, theirs) == []
                else:  # rows that come twice are summed in fp32 here, by torch's dense gradient in bf16
                    assert all(torch.allclose(ours[n].float(), v.float(), atol=0.03) for n, v in theirs.items())
                engine.destroy()
    told = [str(w.message) for w in said if "is made dense" in str(w.message)]
    assert len(told) == (1 if rank == 0 else 0), told
    assert not told or "sparse=False" in told[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_gradients_count_as_dense_ones(world):
    run_ranks(world, _trains)


def test_a_table_that_is_asked_in_parts_keeps_its_other_rows():
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True))
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine, *_ = strata.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": sgd})
    before = model[0].weight.detach().clone()
    engine.backward(engine(torch.tensor([1, 1, 4])).sum())
    engine.step()
    change = (before - model[0].weight.detach())[:, 0].cpu()
    assert torch.allclose(change, torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0])), change
    engine.destroy()
