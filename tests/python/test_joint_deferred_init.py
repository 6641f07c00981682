"""Parameters that are sharded together under zero.Init: few handshakes of ranks for models of many modules."""

import pytest
import torch
from ranks import run_ranks
from replayed_models import config_of_birth
from strata import deferred_init
from strata.model.parameter import owner_of
from strata.zero import GatheredParameters, Init
from torch import nn

LAYERS, WIDTH = 6, 16
LARGE = 1 << 20  # elements: all is built as torch builds it


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """Its constructor changes a child's parameters; with ``fails`` one of its layers' constructors fails half way."""

    def __init__(self, fails=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        if fails:
            with pytest.raises(ValueError, match="half way"):
                HalfWay()
        with torch.no_grad():
            self.layers[1].norm.weight.fill_(3.0)


class HalfWay(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        raise ValueError("half way")


def _built(replay_above, values_come_later, **arguments):
    """(how many are sharded as one, by model; {name: whole value})."""
    torch.manual_seed(3)
    with Init(config_dict_or_path=config_of_birth(replay_above=replay_above)) as context:
        context._deferred.values_come_later = values_come_later
        model = Layers(**arguments)
    assert model.layers[2].norm.weight.numel() == WIDTH  # read, so whole; so are its module's other parameters
    assert [n for n, p in model.named_parameters() if p.numel()] == [f"layers.2.norm.{n}" for n in ("weight", "bias")]
    cores = {id(owner_of(p)[0]) for p in model.parameters()}
    with GatheredParameters(list(model.parameters())):
        return len(cores), {name: p.detach().clone() for name, p in model.named_parameters()}


def _compare():
    for replay_above in (0, LARGE):
        alone = deferred_init._MOST_AT_ONCE, deferred_init._POSTPONED
        try:
            deferred_init._MOST_AT_ONCE = 1
            many, expected = _built(replay_above, values_come_later=False)
            deferred_init._MOST_AT_ONCE = alone[0]
            few, values = _built(replay_above, values_come_later=True, fails=replay_above == LARGE)
            deferred_init._MOST_AT_ONCE, deferred_init._POSTPONED = 304, 300  # elements: of a layer, and fewer
            some, in_parts = _built(replay_above, values_come_later=True)
        finally:
            deferred_init._MOST_AT_ONCE, deferred_init._POSTPONED = alone
        assert many == 2 * LAYERS and few <= 2 and few < some <= LAYERS + 2, (replay_above, many, few, some)
        assert expected["layers.1.norm.weight"].eq(3).all()
        for found in (values, in_parts):
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_many_modules_are_sharded_at_once():
    run_ranks(2, _compare)
