"""Parameters that are used in tiles, trained against plain torch; their names and shapes do not change."""

import copy

import pytest
import strata
import torch
from devices import needs_a_gpu_each, test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiled_models import ADAMW, IDS, TiledModel, batches_of, loss_of, make_tiled, tiled_config
from tiny_models import DTYPES, differences, full_parameters, make_engine, rank_and_world, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from strata.model.tiles import tiles_of

STEPS = 3
CLIPPING = 0.1  # the norm of all gradients decides about each
# Gradients of inputs are sums over tiles, in another order than one product's.
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 2e-6}, "bf16": {"rtol": 2e-2, "atol": 5e-3}}


def _adamw(parameters):
    return torch.optim.AdamW(parameters, **ADAMW)


def _plain(model, world, batches, dtype, accumulation=1):
    trainer = PlainTrainer(model, world, _adamw, DTYPES[dtype], CLIPPING, accumulation)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        losses += trainer.micro_step(list(batch), loss_of)
        if (step + 1) % accumulation == 0:
            trainer.step()
            norms.append(trainer.norm)
    return losses, norms, trainer.values()


def _require_close(ours, theirs, dtype):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        mine = ours[name].to(value.device)
        if dtype == "bf16":  # a rounding may decide the sign of an input of relu
            assert (mine.float() - value.float()).abs().mean() < 2e-3, name
        else:
            torch.testing.assert_close(mine, value, **TOLERANCE[dtype], msg=lambda m: f"{name}: {m}")


def _against_plain(cases):
    rank, world = rank_and_world()
    for tied, frozen, dtype, accumulation, more in cases:
        model = make_tiled(tied=tied, frozen=frozen)
        start = copy.deepcopy(model)
        batches = batches_of(STEPS * accumulation, world)
        losses, norms, values = _plain(model, world, batches, dtype, accumulation)
        names = list(dict(model.named_parameters()))
        config = tiled_config(dtype=dtype, accumulation=accumulation, gradient_clipping=CLIPPING, **more)
        engine = make_engine(model, config)
        assert len(tiles_of(model.up.weight)) == (8 if dtype == "fp32" else 4)
        assert list(dict(model.named_parameters())) == names
        assert model.up.weight.ds_shape == (64, 16) and model.up.weight.numel() == 0
        ours, our_norms = [], []
        for step, batch in enumerate(batches):
            ours.append(train_step(engine, batch[rank], loss_of))
            if (step + 1) % accumulation == 0:
                our_norms.append(engine.get_global_grad_norm())
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses[rank::world]), **TOLERANCE[dtype])
        assert our_norms == pytest.approx(norms, rel=TOLERANCE[dtype]["rtol"])
        trained = full_parameters(model)
        _require_close(trained, values, dtype)
        for name in frozen:
            assert torch.equal(trained[name].cpu(), start.get_parameter(name).detach().cpu().to(DTYPES[dtype])), name
        engine.destroy(keep_values=True)
        _require_close({n: p.detach() for n, p in model.named_parameters()}, values, dtype)
        assert type(model.up.weight) is torch.nn.Parameter and model.up.weight.shape == (64, 16)
        assert "forward" not in model.up.__dict__
        assert model(batches[0][0]).shape == (2, 9, IDS)


CASES = [
    (False, (), "fp32", 1, {}),
    (True, (), "fp32", 2, {}),
    (False, ("up.weight", "embedding.weight"), "fp32", 1, {}),
    (True, (), "bf16", 1, {}),
    (True, (), "fp32", 2, {"strata": {"reduce_at": "boundary"}}),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tiles_train_as_plain_torch_does(world):
    run_ranks(world, _against_plain, CASES)


@needs_a_gpu_each
def test_ranks_that_gather_together_train_so_too():
    run_ranks(2, _against_plain, [(True, (), "fp32", 1, {"strata": {"collectives": "c10d"}})])


def _embedding_bits():
    rank, world = rank_and_world()
    trained = []
    for config in (tiled_config(match=["embedding.weight"]), tiled_config(rows=1000)):
        model = make_tiled()
        engine = make_engine(model, config)
        for batch in batches_of(STEPS, world):
            train_step(engine, batch[rank], loss_of)
        trained.append(full_parameters(model))
        engine.destroy()
    return differences(*trained)


def test_an_embedding_in_tiles_trains_to_the_same_bits():
    assert run_ranks(2, _embedding_bits) == [[], []]


class Checkpointed(TiledModel):
    def forward(self, ids):
        hidden = checkpoint(self.hidden, ids, use_reentrant=False)
        return self.head(hidden)


def _checkpointed():
    rank, world = rank_and_world()
    trained = []
    for cls in (TiledModel, Checkpointed):
        torch.manual_seed(0)
        model = cls(tied=True).to(test_device())
        engine = make_engine(model, tiled_config())
        for batch in batches_of(STEPS, world):
            train_step(engine, batch[rank], loss_of)
        trained.append(full_parameters(model))
        engine.destroy()
    return differences(*trained)


def test_activation_checkpointing_changes_no_bit():
    assert run_ranks(2, _checkpointed) == [[], []]


def _offloaded(folder):
    rank, world = rank_and_world()
    trained = []
    host = {"device": "cpu", "pin_memory": True}
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2, "buffer_size": 200_000}
    for param, states in ((None, None), (None, host), (host, host), (nvme, nvme)):
        model = make_tiled(tied=True)
        config = tiled_config()
        config["zero_optimization"] |= {key: value for key, value in (("offload_param", param),
                                                                      ("offload_optimizer", states)) if value}
        engine = make_engine(model, config)
        for batch in batches_of(STEPS, world):
            train_step(engine, batch[rank], loss_of)
        trained.append(full_parameters(model))
        engine.destroy()
    return [differences(trained[0], other) for other in trained[1:]]


@needs_a_gpu_each
def test_offloading_changes_no_bit(tmp_path):
    assert run_ranks(2, _offloaded, tmp_path) == [[[]] * 3] * 2


def _momentum(folder, rows, saves):
    """An optimizer of the user's; the same data on every rank."""
    rank, world = rank_and_world()
    model = make_tiled(tied=True)
    config = tiled_config(rows=rows, checkpoint={"async": True})
    del config["optimizer"]
    engine = make_engine(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if saves:
        for batch in batches_of(STEPS, 1):
            train_step(engine, batch[0], loss_of)
        engine.save_checkpoint(folder, "trained")
    else:
        engine.load_checkpoint(folder, "trained")
    bits = {f"momentum {name}": strata.utils.safe_get_full_optimizer_state(p, "momentum_buffer").cpu()
            for name, p in model.named_parameters()}
    bits |= {name: value.cpu() for name, value in full_parameters(model).items()}
    engine.destroy()
    return bits


def test_an_optimizer_of_the_users_goes_on_with_other_tiles_at_other_ranks(tmp_path):
    saved = run_ranks(2, _momentum, tmp_path, 9, True)[0]
    for world, rows in ((3, 5), (1, 1000)):
        assert not differences(run_ranks(world, _momentum, tmp_path, rows, False)[0], saved)


def _few_at_once(rows):
    """Returns the memory held and the memory forecast for a weight of ``rows`` rows, in tiles of 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(rows, 64), nn.Linear(64, rows)).to(test_device())
    model[1].weight = model[0].weight
    config = tiled_config(rows=256)  # 16 KiB of 16 numbers: 64 rows of these
    engine = make_engine(model, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, rows, (2, 9), generator=generator).to(test_device())
        engine.backward(nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten()))
        engine.step()
    kinds = ("gathered weights", "gradients", "gradient shards", "weights")
    held = {kind: engine.memory_report()["device", kind][1] for kind in kinds}
    forecast = engine.memory_forecast()
    engine.destroy()
    return held, {kind: forecast[kind] for kind in kinds}


@pytest.mark.parametrize("rows", [4096, 4070])  # with a last tile that is shorter
def test_few_tiles_are_there_at_once_as_the_forecast_says(rows):
    for held, forecast in run_ranks(2, _few_at_once, rows):
        bias = 4 * 4096 + 4096
        assert held["gathered weights"] <= 2 * (16 << 10) + bias
        assert held["gradients"] <= (16 << 10) + 2 * bias
        for kind, peak in held.items():
            assert peak <= forecast[kind] <= peak + 2 * (16 << 10), (kind, held, forecast)


def _one_layer(size, tile_rows):
    """{kind: (the most held in three steps, forecast)} of one linear layer, in tiles but for its input."""
    torch.manual_seed(0)
    model = nn.Linear(size, size, bias=False).to(test_device())
    config = tiled_config(stage=3)
    config["strata"]["tiles"]["max_gather"] = 4 * size * tile_rows
    engine = make_engine(model, config)
    for _ in range(3):
        engine.backward(engine(torch.ones(4, size, device=test_device())).square().mean())
        engine.step()
    forecast = engine.memory_forecast()
    report = engine.memory_report()
    kinds = ("gathered weights", "gradients", "gradient shards", "weights")
    held = {kind: (report["device", kind][1], forecast[kind]) for kind in kinds}
    engine.destroy()
    return held


def test_a_step_takes_four_shards_and_three_tiles():
    size, tile_rows = 512, 30  # 18 tiles, of which the last has two rows
    for held in run_ranks(2, _one_layer, size, tile_rows):
        tile = -(-4 * size * 29 // 4096) * 4096  # rows of the largest, in pages
        assert held["gathered weights"] == (2 * tile, 2 * tile)
        assert all(bytes <= tile for bytes in held["gradients"])
        for kind, (peak, forecast) in held.items():
            assert peak == forecast, (kind, held)


def _bits_of_one_rank():
    """[(found, wanted)]: a linear layer's output and its input's gradient, in tiles, where the rank has all weights."""
    found = []
    for dtype in ("fp32", "bf16"):
        torch.manual_seed(0)
        plain = nn.Linear(64, 64).to(test_device(), DTYPES[dtype])
        engine = make_engine(copy.deepcopy(plain), tiled_config(rows=64, dtype=dtype))  # a page, which a unit begins
        tiles = tiles_of(engine.module.weight)
        assert len(tiles) > 1 and len(tiles.runs()) == 1
        mine, theirs = (torch.linspace(-1, 1, 192, device=test_device()).to(DTYPES[dtype]).view(3, 64).requires_grad_()
                        for _ in range(2))  # fmt: skip
        outs = engine(mine), plain(theirs)
        engine.backward(outs[0].float().square().mean())
        outs[1].float().square().mean().backward()
        found += [(outs[0].detach().cpu(), outs[1].detach().cpu()), (mine.grad.cpu(), theirs.grad.cpu())]
        engine.destroy()
    return found


def test_one_rank_that_has_all_weights_computes_the_whole_layers_bits():
    for found, wanted in run_ranks(1, _bits_of_one_rank)[0]:
        assert torch.equal(found, wanted)


def _reads_and_writes():
    rank, world = rank_and_world()
    model = make_tiled(tied=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = make_engine(model, tiled_config())
    weight = model.up.weight
    assert torch.equal(weight + 0, before["up.weight"])  # outside of its module: a copy
    assert torch.equal(strata.utils.safe_get_full_fp32_param(weight).to(test_device()), before["up.weight"])
    with strata.zero.GatheredParameters(weight, modifier_rank=world - 1):
        assert weight.shape == (64, 16)
        if rank == world - 1:
            weight.data.mul_(2.0)
    assert weight.numel() == 0
    rows = 0
    for begin, end, piece in strata.iter_pieces(weight, modifier_rank=0):
        assert torch.equal(piece, 2 * before["up.weight"][begin:end])
        if rank == 0:
            piece.add_(1.0)
        rows += end - begin
    assert rows == 64
    for begin, end, piece in strata.iter_pieces(weight):
        assert torch.equal(piece, 2 * before["up.weight"][begin:end] + 1.0)
    assert [(b, e) for b, e, _ in strata.iter_pieces(model.norm.weight)] == [(0, 64)]
    engine.backward(loss_of(engine, batches_of(1, world)[0][rank]))
    gradient = strata.utils.safe_get_full_grad(model.embedding.weight)
    assert gradient.shape == (IDS, 16) and gradient.abs().sum() > 0
    engine.step()
    state = strata.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    strata.utils.safe_set_full_optimizer_state(weight, torch.ones_like(state), "exp_avg")
    assert torch.equal(strata.utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.ones(64, 16))
    saved = engine.module_state_dict()
    assert saved["up.weight"].shape == (64, 16) and saved["head.weight"] is saved["embedding.weight"]
    saved["up.weight"].fill_(0.5)
    engine.load_module_state_dict(saved)
    assert engine.module_state_dict()["up.weight"].eq(0.5).all()
    copied = copy.deepcopy(model)
    assert torch.equal(copied.up.weight.detach().cpu(), torch.full((64, 16), 0.5))
    engine.destroy()


def test_what_users_read_and_write_has_the_parameters_name_and_shape():
    run_ranks(2, _reads_and_writes)


def _reads_by_others():
    """A module that computes with another's weight, of which autograd must know."""
    rank, world = rank_and_world()

    class Reader(TiledModel):
        def forward(self, ids):
            return torch.nn.functional.linear(self.hidden(ids), self.head.weight, self.head.bias)

    torch.manual_seed(0)
    model = Reader().to(test_device())
    batches = batches_of(STEPS, world)
    *_, values = _plain(model, world, batches, "fp32")
    engine = make_engine(model, tiled_config(gradient_clipping=CLIPPING))
    for batch in batches:
        train_step(engine, batch[rank], loss_of)
    _require_close(full_parameters(model), values, "fp32")
    engine.destroy()


def test_a_module_that_reads_anothers_weight_trains_it():
    run_ranks(2, _reads_by_others)
