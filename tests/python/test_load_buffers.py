"""Persistent buffers of models that are loaded sharded: they move to the device before they are read."""

import strata
import torch
import transformers
from devices import test_device
from ranks import run_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


class _NormConfig(transformers.PretrainedConfig):
    model_type = "strata_norm"


class _WithNorm(transformers.PreTrainedModel):
    config_class = _NormConfig

    def __init__(self, config):
        super().__init__(config)
        self.first = torch.nn.BatchNorm1d(7)
        self.second = torch.nn.BatchNorm1d(7)
        self.post_init()


def _move_as_to_a_gpu(tree, device):
    """Acts on the CPU like a move to a GPU: modules get other tensors."""
    copies = {id(b): b.clone() for _, module, _ in tree.modules for b in module._buffers.values()}
    for _, module, _ in tree.modules:
        module._buffers.update({name: copies[id(b)].to(device) for name, b in module._buffers.items()})


def _load_norm(folder):
    transformers.AutoConfig.register(_NormConfig.model_type, _NormConfig, exist_ok=True)
    strata.engine.move_buffers = _move_as_to_a_gpu
    engine, *_ = strata.load_pretrained(folder, CONFIG, model_class=_WithNorm)
    assert engine.module.first.running_mean.device == test_device()
    return {name: buffer.cpu().numpy() for name, buffer in engine.module.named_buffers(remove_duplicate=False)}


def test_buffers_that_move_to_the_device_get_the_files_values(tmp_path):
    model = _WithNorm(_NormConfig())
    for buffer in model.buffers():
        buffer.add_(torch.arange(buffer.numel()).view_as(buffer) + 2)
    model.save_pretrained(tmp_path)
    for found in run_ranks(2, _load_norm, tmp_path):
        for name, buffer in model.named_buffers(remove_duplicate=False):
            assert torch.equal(torch.as_tensor(found[name]), buffer), name
