"""Attributes of DeepSpeed's optimizers, schedules, configurations and leaves that scripts read."""

import pytest
import strata
import torch
from ranks import run_ranks
from strata.compat import accelerator, script_functions, sharding
from strata.compat import config as compat_config
from strata.compat.names import MODULES
from strata.compat.engine import initialize
from strata.model.leaves import get_z3_leaf_modules
from strata.ops.adam import DeepSpeedCPUAdam, FusedAdam
from strata.schedule import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from tiny_models import Block, config_of, loss_of, make_batches, make_engine, make_model, rank_and_world

SCHEDULES = {
    WarmupLR: ({"warmup_num_steps": 10}, {"min_lrs": [0.0], "max_lrs": [0.5], "warmup_num_steps": 10}),
    WarmupDecayLR: ({"total_num_steps": 20, "warmup_max_lr": 0.1}, {"max_lrs": [0.1], "total_num_steps": 20}),
    WarmupCosineLR: ({"total_num_steps": 20, "warmup_num_steps": 4, "warmup_type": "linear"},
                     {"org_lrs": [0.5], "warmup_type": "linear", "cos_min_ratio": 0.0001}),
    OneCycle: ({"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
               {"min_lrs": [0.01], "max_lrs": [0.1], "step_ratio": 0.5, "total_size": 10.0,
                "min_moms": [(0.8, 0.99)], "max_moms": [(0.9, 0.99)]}),
    LRRangeTest: ({"lr_range_test_step_size": 7}, {"min_lr": [0.001], "step_size": 7, "staircase": False}),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda cls: cls.__name__)
def test_schedules_tell_what_they_are(schedule):
    params, attributes = SCHEDULES[schedule]
    adam = {"type": "Adam", "params": {"lr": 0.5, "betas": [0.9, 0.99]}}
    engine = make_engine(make_model(), {
        "train_micro_batch_size_per_gpu": 1, "optimizer": adam, "scheduler": {"type": schedule.type, "params": params}})
    client = schedule(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5, betas=(0.9, 0.99)), **params)
    for found in (engine.lr_scheduler, client):
        assert found.get_mom() == getattr(found, "max_moms", None)
        assert isinstance(found, schedule)
        assert {name: getattr(found, name) for name in attributes} == attributes
        for _ in range(3):
            found.step()
        assert found.get_mom() == ([(pytest.approx(0.9 - 0.1 * 3 / 5), 0.99)] if schedule is OneCycle else None)
        if schedule is WarmupCosineLR:
            assert found.get_lr_ratio() == pytest.approx(2 / 4)
    engine.destroy()


def _optimizers():
    rank, world = rank_and_world()
    for stage, dtype in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp16")):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        if dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "min_loss_scale": 2}
        elif dtype == "bf16":
            config["bf16"] = {"enabled": True}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        engine, optimizer, *_ = initialize(model=make_model(), config=config)
        assert isinstance(optimizer, FusedAdam) and optimizer.adam_w_mode
        kinds = [kind for kind in ("BF16_Optimizer", "FP16_Optimizer", "ZeROOptimizer", "DeepSpeedOptimizer")
                 if isinstance(optimizer, getattr(sharding, kind))]
        assert kinds == [["DeepSpeedOptimizer"], ["BF16_Optimizer", "ZeROOptimizer", "DeepSpeedOptimizer"],
                         ["ZeROOptimizer", "DeepSpeedOptimizer"], ["ZeROOptimizer", "DeepSpeedOptimizer"]][stage]
        for _ in range(3):
            loss = loss_of(engine, make_batches(1, world)[0][rank])
            engine.backward(loss)
            engine.step()
        scaler, settings = optimizer.loss_scaler, optimizer.loss_scale_config
        assert optimizer.needs_scaler() == optimizer.dynamic_loss_scale == scaler.dynamic == (dtype == "fp16")
        assert scaler.cur_scale == scaler.loss_scale == optimizer.cur_scale == engine.loss_scale()
        assert (scaler.cur_scale, settings.cur_iter) == (32.0 if dtype == "fp16" else 1.0, 3)
        assert (settings.scale_window, settings.min_loss_scale) == ((2, 2.0) if dtype == "fp16" else (None, None))
        assert optimizer.optimizer.param_groups is optimizer.param_groups
        assert not hasattr(optimizer.optimizer, "optimizer")
        masters = optimizer.fp32_partitioned_groups_flat
        parts = [strata.utils.safe_get_local_fp32_param(p) for p in engine.module.parameters()]
        assert len(masters) == 1 and torch.equal(masters[0], torch.cat([part.view(-1) for part in parts]))
        engine.destroy()
    inner = torch.optim.SGD
    engine = make_engine(make_model(), config_of(1, optimizer=False), optimizer=lambda ps: inner(ps, lr=0.1))
    assert type(engine.optimizer.optimizer) is inner
    engine.destroy()
    offloaded = make_engine(make_model(), config_of(2, zero_optimization={
        "stage": 2, "offload_optimizer": {"device": "cpu"}}))
    assert isinstance(offloaded.optimizer, DeepSpeedCPUAdam)
    offloaded.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_tell_what_they_are(world):
    run_ranks(world, _optimizers)


def test_a_configuration_is_read_with_second_names_and_defaults():
    found = compat_config.get_zero_config({"zero_optimization": {
        "stage": 3, "stage3_max_live_parameters": 7, "cpu_offload": True, "cpu_offload_use_pin_memory": False,
        "offload_param": {"device": "nvme", "nvme_path": "/x"}, "reduce_bucket_size": "auto"}})
    assert (found.stage, found.max_live_parameters, found.overlap_comm, found.reduce_bucket_size) == (3, 7, True, 5e8)
    assert isinstance(found.offload_param, compat_config.DeepSpeedZeroOffloadParamConfig)
    assert (found.offload_param.device, found.offload_param.buffer_count) == ("nvme", 5)
    assert (found.offload_optimizer.device, found.offload_optimizer.pin_memory) == ("cpu", False)
    assert found.model_dump()["offload_param"]["nvme_path"] == "/x"
    assert compat_config.get_zero_config({}) == compat_config.DeepSpeedZeroConfig()
    assert not found.contiguous_gradients - 1
    with pytest.raises(AttributeError):
        found.max_live_parameter
    with pytest.raises(strata.ConfigError, match="max_live_parameter"):
        compat_config.DeepSpeedZeroConfig(max_live_parameter=7)


def test_leaves_of_the_configuration_are_marked():
    leaf = {"classes": ["Block"], "name_suffixes": ["head"]}
    engine = make_engine(make_model(), config_of(3, zero_optimization={"stage": 3, "leaf_module": leaf}))
    assert get_z3_leaf_modules(engine.module) == [*engine.module.layers, engine.module.head]
    assert all(isinstance(block, Block) for block in engine.module.layers)
    engine.destroy()


def test_single_functions_and_constants():
    model = make_model()
    found = script_functions.recursive_getattr(model, "layers.1.up.weight")
    assert found is model.layers[1].up.weight
    replaced = torch.nn.Linear(16, 32)
    script_functions.recursive_setattr(model, "layers.1.up", replaced)
    script_functions.recursive_setattr(model, "extra", replaced)
    assert model.layers[1].up is replaced is model.extra
    with pytest.raises(AttributeError):
        script_functions.recursive_getattr(model, "layers.9.up")
    assert accelerator.required_torch_version(min_version=2.0) and accelerator.required_torch_version("1.9", "99.0")
    assert not accelerator.required_torch_version(max_version=1.13)
    assert torch.__version__.startswith(accelerator.TORCH_INFO["version"])
    schedules = MODULES["runtime.lr_schedules"]
    named = [schedules[name] for name in ("WARMUP_LR", "CYCLE_MIN_LR", "WARMUP_LOG_RATE")]
    assert named == ["WarmupLR", "cycle_min_lr", "log"]
    assert MODULES["compression.helper"].keys() == {"recursive_getattr", "recursive_setattr"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert compat_config.get_torch_optimizer(optimizer) is optimizer
    assert compat_config.get_lr_from_config({"type": "WarmupLR", "params": {"warmup_max_lr": 3}}) == (3, "")
