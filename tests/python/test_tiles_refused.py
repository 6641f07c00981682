"""A parameter that cannot be used in tiles is refused by name, with numbers, and the model stays unchanged. Also:
users' own tiling rules."""

import logging

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from tiled_models import TiledModel, batches_of, loss_of, make_tiled, tiled_config
from tiny_models import differences, full_parameters, make_engine, rank_and_world, train_step
from torch import nn

from strata.model.tiles import tiles_of
from strata.tiles import TilingRule
from strata.tiles.functions import apply_tile


class Scaled(nn.Module):
    """No class that a rule knows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, 64 * 16).view(64, 16))

    def forward(self, x):
        return x @ torch.tanh(self.table).t()


class Model(TiledModel):
    def __init__(self):
        super().__init__()
        self.up = Scaled()


class ScaledRule(TilingRule):
    parameters = ("table",)

    def forward(self, module, tiles, x):
        return torch.cat([apply_tile(_scaled, tile, x) for tile in tiles["table"]], -1)


def _scaled(rows, x):
    return x @ torch.tanh(rows).t()


class NoForward(TilingRule):
    parameters = ("table",)


class TooFew(ScaledRule):
    def cut(self, module, name, full_name, rows, row_bytes, most):
        return super().cut(module, name, full_name, rows, row_bytes, most)[:-1]


class Overlapping(ScaledRule):
    def cut(self, module, name, full_name, rows, row_bytes, most):
        return [(0, 9), (8, 16), (16, 64)]


def _refused(model, config, kind=strata.ConfigError):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = {name: type(p) for name, p in model.named_parameters()}
    with pytest.raises(kind) as error:
        make_engine(model, config)
    assert not differences({name: p.detach() for name, p in model.named_parameters()}, before)
    assert {name: type(p) for name, p in model.named_parameters()} == classes
    assert all("forward" not in module.__dict__ and tiles_of(getattr(module, "weight", None)) is None
               for module in model.modules())
    return str(error.value)


def _refusals():
    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = Model().to(test_device())
    said = _refused(model, tiled_config())
    assert "'up.table' takes 4096 bytes, more than the 576" in said and "no tiling rule for Scaled ('up')" in said
    assert "strata.register_tiling(Scaled, rule)" in said and "strata.tiles.max_gather" in said
    for rule, text in ((TooFew(), "the last rows are in no tile: rows 56 to 64"),
                       (Overlapping(), "tiles overlap, or are not in order: rows 8 to 16")):
        strata.register_tiling(Scaled, rule)
        said = _refused(model, tiled_config())
        assert "'up.table'" in said and text in said and "64 rows" in said, said
    said = _refused(make_tiled(), {**tiled_config(), "strata": {"tiles": {"max_gather": 63}}})
    assert "strata.tiles.max_gather: a tile of 'embedding.weight' holds one row at least; give 64 or more" in said
    bag = make_tiled()
    bag.embedding.max_norm = 1.0
    assert "max_norm=1.0" in _refused(bag, tiled_config(), strata.UsageError)
    own = make_tiled()
    own.up.forward = lambda x: x
    with pytest.raises(strata.ConfigError, match="that module has a forward of its own in place of Linear's"):
        make_engine(own, tiled_config())
    for wrong in (lambda: strata.register_tiling(Scaled, ScaledRule),
                  lambda: strata.register_tiling("Scaled", ScaledRule())):
        with pytest.raises(strata.UsageError, match="register_tiling"):
            wrong()
    with pytest.raises(strata.UsageError, match="NoForward has no forward.module, tiles"):
        strata.register_tiling(Scaled, NoForward())
    # A failure after the cut: nothing is left of it.
    assert _refused(make_tiled(), tiled_config(zero_optimization={"offload_param": {
        "device": "nvme", "nvme_path": "/proc/nowhere"}}), strata.Error)


def test_refusals_name_the_parameter_and_leave_the_model_alone():
    run_ranks(2, _refusals)


def _own_rule():
    rank, world = rank_and_world()
    strata.register_tiling(Scaled, ScaledRule())
    trained = []
    for config in (tiled_config(match=["up.table"]), tiled_config(rows=10000)):
        torch.manual_seed(0)
        model = Model().to(test_device())
        engine = make_engine(model, config)
        for batch in batches_of(3, world):
            train_step(engine, batch[rank], loss_of)
        trained.append(full_parameters(model))
        engine.destroy()
    for name, value in trained[1].items():
        torch.testing.assert_close(trained[0][name], value, rtol=1e-4, atol=2e-5, check_device=False)


def test_a_rule_of_the_users_trains_its_module():
    run_ranks(2, _own_rule)


def _nobody_asked():
    from strata.tiles.cutting import Budget

    of_rank, Budget.of_rank = Budget.of_rank, classmethod(lambda cls, config, *_: cls(config, 3000))
    try:
        torch.manual_seed(0)
        model = Model().to(test_device())
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("strata").addHandler(handler)
        config = tiled_config()
        del config["strata"]
        engine = make_engine(model, config)
        assert tiles_of(model.up.table) is None and len(tiles_of(model.down.weight)) == 2
        assert any("'up.table' takes more than half" in text and "no tiling rule for Scaled" in text for text in said)
        train_step(engine, batches_of(1, 2)[0][0], loss_of)
        engine.destroy()
    finally:
        Budget.of_rank = of_rank


def test_what_nobody_asked_for_is_no_error():
    run_ranks(2, _nobody_asked)


def _too_much():
    model = make_tiled()
    engine = make_engine(model, tiled_config())
    weight = model.up.weight
    tiles = tiles_of(weight)
    with pytest.raises(strata.UsageError, match="would change a copy of it; change it within strata.zero.Gathered"):
        weight.mul_(2.0)
    tiles.most_read = 4000
    with pytest.raises(strata.UsageError, match="'up.weight' is used in tiles, and all of it at once is too much to "
                                                "gather: 4096 bytes, of at most 4000. Use strata.iter_pieces"):
        weight.sum()
    from strata.tiles import host_copy

    free, host_copy.available_host_memory = host_copy.available_host_memory, lambda: 4095
    try:
        with pytest.raises(strata.UsageError, match="'up.weight' takes 4096 bytes, and the host has 4095 available.*"
                                                    "strata.iter_pieces"):
            with strata.zero.GatheredParameters(weight):
                pass
    finally:
        host_copy.available_host_memory = free
    assert weight.numel() == 0
    with pytest.raises(strata.UsageError, match="an id of 'embedding.weight' is not among its 40 rows"):
        engine(torch.full((1, 2), 40, device=test_device()))
    engine(batches_of(1, 2)[0][0])
    with pytest.raises(strata.UsageError, match="'embedding.weight' is used in tiles by an engine that lives.*"
                                                "keep_values=True"):
        make_engine(model, tiled_config())
    engine.destroy(keep_values=True)
    make_engine(model, tiled_config()).destroy()
    with pytest.raises(strata.UsageError, match="parameters of this model are empty"):
        make_engine(model, tiled_config())


def test_what_is_too_much_at_once_says_what_to_use():
    run_ranks(2, _too_much)


def test_at_other_stages_the_setting_is_a_hint():
    assert any(path == "strata.tiles" for path, *_ in strata._C.Config.parse(
        '{"zero_optimization": {"stage": 2}, "strata": {"tiles": {"max_gather": "1MiB"}}}').hints)
