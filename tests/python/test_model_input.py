"""The description of a model for the engine has the order in which torch itself walks the model."""

import torch
from strata.model.model_input import ModelTree, describe_modules, describe_parameters
from torch import nn


class Deep(nn.Module):
    """Modules in two places, tied parameters, places that are empty, containers within containers."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(2, 2)
        self.first = nn.ModuleList([nn.ModuleDict({"a": shared, "b": nn.Linear(2, 3, bias=False)}), nn.Identity()])
        self.nothing = None
        self.register_module("empty", None)
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.Sequential(shared, nn.Linear(2, 2))
        self.second[1].weight = shared.weight
        self.register_parameter("missing", None)


def test_modules_and_parameters_come_as_torch_names_them():
    model = Deep()
    tree = ModelTree(model)
    assert [(path, module) for path, module, _ in tree.modules] == list(model.named_modules())
    torchs = list(model.named_parameters())
    assert [name for name, _ in tree.parameters] == [name for name, _ in torchs]
    assert all(a is b for (_, a), (_, b) in zip(tree.parameters, torchs, strict=True))


def test_a_module_in_two_places_belongs_to_where_it_is_met_first():
    tree = ModelTree(Deep())
    entries = describe_modules(tree)
    names = [entry[0] for entry in describe_parameters(tree, {})]
    found = {path: (entries[parent][0] if parent >= 0 else None, [names[p] for p in own])
             for path, _, parent, own, *_ in entries}
    assert found == {
        "": (None, ["scale"]),
        "first": ("", []),
        "first.0": ("first", []),
        "first.0.a": ("first.0", ["first.0.a.weight", "first.0.a.bias"]),
        "first.0.b": ("first.0", ["first.0.b.weight"]),
        "first.1": ("first", []),
        "second": ("", []),
        "second.1": ("second", ["first.0.a.weight", "second.1.bias"]),
    }
