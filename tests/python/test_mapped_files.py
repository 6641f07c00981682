"""Models whose values are views of mapped files, as safetensors and torch.load(mmap=True) give them: the files are
unmapped beside the program, unless somebody else has them, too."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import config_of, differences, full_parameters, make_batches, make_engine, make_model, train_step

from strata import _C


def _by_safetensors(values, folder):
    path = folder / "model.safetensors"
    save_file(values, path)
    with safe_open(path, "pt") as file:
        return path, {name: _parameter(file.get_tensor(name)) for name in file.keys()}


def _parameter(values):
    return torch.nn.Parameter(values, requires_grad=False)  # is no view, which would keep what it is one of


def _by_torch(values, folder):
    path = folder / "model.pt"
    torch.save(values, path)
    return path, {name: _parameter(value) for name, value in torch.load(path, mmap=True).items()}


BOTH = pytest.mark.parametrize("mapped", [_by_safetensors, _by_torch])


def _values():
    return {"one": torch.arange(5000.0), "other": torch.arange(7000.0).view(70, 100)}


def _on_host(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


def _empty(tensors):
    for tensor in tensors.values():
        tensor.data = torch.empty(0)


@BOTH
def test_a_file_that_only_these_tensors_had_is_unmapped(mapped, tmp_path):
    path, tensors = mapped(_values(), tmp_path)
    files = _C.MappedFiles(list(tensors.values()))
    assert len(files) == 1 and _is_mapped(path)
    _empty(tensors)
    assert _is_mapped(path)
    assert files.unmap_unused() == 1
    assert not _is_mapped(path)
    assert files.unmap_unused() == 0


@BOTH
@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[3:5], lambda t: t.untyped_storage()],
                         ids=["tensor", "view", "storage"])
def test_a_file_of_which_somebody_has_a_part_stays(mapped, keep, tmp_path):
    path, tensors = mapped(_values(), tmp_path)
    files = _C.MappedFiles(list(tensors.values()))
    kept = keep(tensors.pop("other"))
    before = bytes(kept.untyped_storage()) if isinstance(kept, torch.Tensor) else bytes(kept)
    _empty(tensors)
    assert files.unmap_unused() == 0
    assert _is_mapped(path)
    assert (bytes(kept.untyped_storage()) if isinstance(kept, torch.Tensor) else bytes(kept)) == before
    del kept
    gc.collect()
    assert not _is_mapped(path)


def test_a_file_that_is_still_open_stays(tmp_path):
    save_file(_values(), tmp_path / "model.safetensors")
    file = safe_open(tmp_path / "model.safetensors", "pt")
    tensors = {"one": _parameter(file.get_tensor("one"))}
    files = _C.MappedFiles(list(tensors.values()))
    _empty(tensors)
    assert len(files) == 1 and files.unmap_unused() == 0
    assert torch.equal(file.get_tensor("other"), _values()["other"])


def test_other_memory_is_not_taken_for_a_file():
    cut = torch.empty(0).set_(torch.zeros(64).untyped_storage()[64:128])
    of_numpy = torch.from_numpy(torch.ones(8).numpy())
    assert len(_C.MappedFiles([torch.ones(8), torch.ones(8)[2:4], cut, of_numpy, torch.empty(3, device="meta")])) == 0


@BOTH
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_mapped_values_trains_and_its_file_goes(mapped, stage, tmp_path):
    tokens = make_batches(1, 1)[0]
    outcomes = []
    for is_mapped in (False, True):
        model = make_model()
        if is_mapped:
            path, values = mapped(_on_host(model), tmp_path)
            model.load_state_dict(values, assign=True)
            del values
            assert _is_mapped(path)
        engine = make_engine(model, config_of(stage))
        train_step(engine, tokens[0])
        outcomes.append(full_parameters(model))
        engine.destroy()
    del engine
    gc.collect()
    assert not differences(*outcomes)
    assert not _is_mapped(path)


def test_values_that_the_user_keeps_stay_readable(tmp_path):
    model = make_model()
    path, parameters = _by_safetensors(_on_host(model), tmp_path)
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    model.load_state_dict(values, assign=True)
    before = {name: value.clone() for name, value in values.items()}
    engine = make_engine(model, config_of(3))
    assert all(torch.equal(values[name], value) for name, value in before.items())
    engine.destroy()
    assert all(torch.equal(values[name], value) for name, value in before.items()) and _is_mapped(path)
