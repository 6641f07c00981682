"""Leaf modules: marked by DeepSpeed's functions or named in the configuration, gathered as one at their entry."""

import pytest
import torch
from comparison import adamw, compare
from devices import needs_a_gpu_each
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata import utils
from strata.model.model_input import ModelTree
from test_errors import error_of
from tiny_models import VOCABULARY, WIDTH, config_of, make_batches, make_engine, make_model, rank_and_world
from torch import nn


class Experts(nn.Module):
    """The batch's first token says which one is asked, so that ranks ask different ones."""

    whole = []

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))

    def forward(self, hidden, asked):
        Experts.whole.append(all(p.numel() > 0 for m in self.modules() for p in dict.values(m._parameters)))
        return hidden + self.each[asked](hidden)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Experts(), Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        asked = int(tokens[0, 0]) % 3
        return self.head(self.second(self.first(self.embedding(tokens), asked), (asked + 1) % 3))


def _config(stage, collectives="auto", **leaves):
    zero = {"stage": stage, "stage3_allgather_sequential": True, "stage3_param_persistence_threshold": 0}
    if leaves:
        zero["leaf_module"] = leaves
    return config_of(stage, zero_optimization=zero, strata={"max_live_bytes": 1, "collectives": collectives})


def _mark(model, how):
    if how == "class":
        utils.set_z3_leaf_modules(model, [Experts])
    elif how == "class name":
        utils.set_z3_leaf_modules(model, [f"{Experts.__module__}.Experts"])
    elif how == "name":
        utils.set_z3_leaf_modules_by_name(model, ["first", "second"])
    return model


LEAVES = {"classes": {"classes": ["Experts"]}, "names": {"names": ["first", "second"]},
          "suffixes": {"name_suffixes": ["rst", "second"]}}


def _trained(collectives):
    _, world = rank_and_world()
    batches = make_batches(4, world)
    batches[:, :, 0, 0] = torch.arange(4 * world).view(4, world) % VOCABULARY
    for stage in range(4):
        for how in ("class", "class name", "name", *LEAVES) if stage == 3 else ("class",):
            reference = PlainTrainer(make_model(Mixture), world, adamw)
            Experts.whole.clear()
            compare(_config(stage, collectives, **LEAVES.get(how, {})), reference,
                    lambda how=how: _mark(make_model(Mixture), how), batches=batches)
            assert len(Experts.whole) > 0 and all(Experts.whole), (stage, how)


@pytest.mark.parametrize("world, collectives", [
    (1, "auto"),
    pytest.param(2, "shm", marks=needs_a_gpu_each),
    pytest.param(2, "c10d", marks=needs_a_gpu_each),
    pytest.param(3, "shm", marks=needs_a_gpu_each),
])
def test_ranks_that_ask_different_experts_train_as_plain_torch(world, collectives):
    run_ranks(world, _trained, collectives)


def _scopes(engine):
    modules = [path for path, _, _ in ModelTree(engine.module).modules]
    return sorted(modules[index] for index in engine.core.scopes())


def _planned():
    def scopes(change, config=None):
        model = make_model(Mixture)
        change(model)
        engine = make_engine(model, config or _config(3))
        found = _scopes(engine)
        engine.destroy()
        return found

    plain = scopes(lambda model: None)
    assert "first.each.0.0" in plain and "first" not in plain
    marked = scopes(lambda model: utils.set_z3_leaf_module(model.first, True))
    assert "first" in marked and not any(path.startswith("first.") for path in marked) and "second.each.0.0" in marked

    def unmarked(model):
        found = utils.set_z3_leaf_modules(model, [Experts])
        assert found == [model.first, model.second] == utils.get_z3_leaf_modules(model)
        assert utils.z3_leaf_module(model.first) and not utils.z3_leaf_module(model.head)
        assert utils.unset_z3_leaf_modules(model, ["Experts"]) == found and utils.get_z3_leaf_modules(model) == []

    assert scopes(unmarked) == plain
    # Where blocks are found, they give way to a leaf that contains them.
    by_blocks = config_of(3)
    assert "first.each.0" in scopes(lambda model: None, by_blocks)
    assert "first" in scopes(lambda model: utils.set_z3_leaf_module(model.first, True), by_blocks)


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_inside_a_leaf_is_a_scope_of_its_own(world):
    run_ranks(world, _planned)


def test_bad_input_says_what_to_give():
    model = make_model(Mixture)
    message = error_of(utils.set_z3_leaf_modules, model, [nn.Conv1d])
    assert message.startswith("ValueError: the model Mixture has no module of the classes [<class"), message
    assert utils.set_z3_leaf_modules(model, ["None"], raise_if_not_found=False) == []
    assert error_of(utils.set_z3_leaf_modules, model, Experts).startswith("TypeError: leaf modules are given as a list")
    assert error_of(utils.unset_z3_leaf_modules, model, [3]).startswith("TypeError: leaf modules are given as a list")
    message = error_of(utils.set_z3_leaf_modules_by_name, model, ["first", "third"])
    assert message.startswith("ValueError: the model Mixture has no module named ['third']"), message
    assert utils.set_z3_leaf_modules_by_name(model, ["third"], raise_if_not_found=False) == ([], ["third"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["each.0", "x"], raise_if_not_found=False) == (
        [model.first.each[0], model.second.each[0]], ["x"])
    assert utils.get_z3_leaf_modules(model) == [model.first.each[0], model.second.each[0]]
