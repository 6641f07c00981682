"""The names of ``deepspeed`` that frameworks use, beside Strata's objects of these names: on one and two ranks."""

import base64
import copy
import inspect
import json
import logging
import math
import pickle
import types

import pytest
import strata
import torch
from ranks import run_ranks
from strata.compat import accelerator, activation, checkpointing, communication, script_functions, sharding
from strata.compat.config import DeepSpeedConfig, ZeroStageEnum
from strata.compat.engine import DeepSpeedEngine, initialize
from strata.compat.sharding import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, ZeROOptimizer
from strata.sequence import groups
from tiny_models import loss_of, make_batches, make_model, rank_and_world


def _config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": math.inf,
        "zero_optimization.reduce_bucket_size": 1024.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 3686.4,
            "offload_optimizer": {"device": "none", "nvme_path": None},
        },
        "zero_allow_untested_optimizer": True,
        **more,
    }


def _engine_at(stage):
    StandIn = activation.DeepSpeedEngine
    rank, world = rank_and_world()
    config, model = _config(stage), make_model()
    engine, optimizer, loader, scheduler = initialize(model=model, config_params=config, model_parameters=(
        p for p in model.parameters()))
    assert isinstance(engine, DeepSpeedEngine) and isinstance(engine, StandIn) and issubclass(type(engine), StandIn)
    assert not isinstance(model, StandIn) and StandIn.backward is DeepSpeedEngine.backward
    assert engine.config is config and engine.module is model and loader is None and scheduler is None
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.optimizer is optimizer
    assert isinstance(optimizer, ZeROOptimizer)
    assert isinstance(optimizer, DeepSpeedZeroOptimizer) == (stage < 3)
    assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    loss = loss_of(engine, make_batches(1, world)[0][rank])
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    assert engine.global_steps == 1 and engine.get_global_grad_norm() > 0 and not optimizer.overflow
    engine.compile(backend="eager", compile_kwargs={})
    assert engine.is_compiled
    assert hasattr(model, "ds_external_parameters") == hasattr(optimizer, "parameter_offload") == (stage == 3)
    if stage == 3:
        _hooks_go_and_come(engine, optimizer.parameter_offload)
    return engine


def _hooks_go_and_come(engine, offload):
    """Removes and restores the hooks as TRL does around generation."""
    assert offload.module is engine.module and list(engine.module.ds_external_parameters()) == []
    with sharding.GatheredParameters(engine.module.parameters()):
        for parameter in engine.module.parameters():
            parameter.ds_active_sub_modules.clear()
            assert parameter.numel() == parameter.ds_numel
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks = offload.backward_hooks = []
        with torch.no_grad():
            engine.module(make_batches(1, 2)[0][0])
        assert not offload.param_coordinator.is_invalid_trace()
        offload._register_deepspeed_module(engine.module)
    copied = copy.deepcopy(engine.module.state_dict())
    assert copied


def _names():
    for stage in (1, 2, 3):
        engine = _engine_at(stage)
        model = engine.module
        engine.destroy()
        engine.destroy()
        again, *_ = initialize(model=model, config=_config(stage))  # which takes the shards over
        loss = loss_of(again, make_batches(1, 2)[0][rank_and_world()[0]])
        again.backward(loss)
        again.step()
        again.destroy(keep_values=True)
        shapes = [p.shape for p in make_model().parameters()]
        assert [p.shape for p in model.parameters()] == shapes and not hasattr(model, "ds_external_parameters")


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_is_what_frameworks_take_it_for(world):
    run_ranks(world, _names)


def _evaluates_and_restores(folder):
    rank, world = rank_and_world()
    config = _config(3)
    trained, *_ = initialize(model=make_model(), config=config)
    tokens = make_batches(1, world)[0][rank]
    trained.backward(loss_of(trained, tokens))
    trained.step()
    trained.save_checkpoint(folder, "pytorch_model")
    del config["optimizer"]
    engine, optimizer, *_ = initialize(model=make_model(), config=config)
    assert optimizer is None and isinstance(engine.optimizer, sharding.ParameterOffload)
    engine.load_checkpoint(folder, "pytorch_model")
    with torch.no_grad():
        assert torch.equal(loss_of(engine.eval(), tokens), loss_of(trained.eval(), tokens))
    engine.save_checkpoint(folder, "evaluated")  # parameters, without an optimizer's state
    again, *_ = initialize(model=make_model(seed=1), config=config)
    again.load_checkpoint(folder, "evaluated")
    with torch.no_grad():
        assert torch.equal(loss_of(again.eval(), tokens), loss_of(trained, tokens))
    again.destroy()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("strata").addHandler(handler)
    parameters = list(engine.module.parameters())
    for _ in range(2):  # an adapter that is merged, looked at, and lost
        with sharding.GatheredParameters(parameters), torch.no_grad():
            parameters[0].add_(1.0)
    assert len([text for text in said if "modifier_rank=None" in text]) == 1
    with torch.no_grad():
        assert torch.equal(loss_of(engine, tokens), loss_of(trained, tokens))


def test_an_engine_without_an_optimizer_evaluates(tmp_path):
    run_ranks(2, _evaluates_and_restores, str(tmp_path))


def test_configurations_come_in_any_form(tmp_path):
    config = _config(2, steps_per_print=10)
    text = json.dumps({k: v for k, v in config.items() if "." not in k})
    (tmp_path / "ds.json").write_text(text)
    for given in (config, str(tmp_path / "ds.json"), base64.urlsafe_b64encode(text.encode()).decode()):
        parsed = DeepSpeedConfig(given)
        assert (parsed.train_batch_size, parsed.zero_optimization_stage, parsed.zero_enabled) == (2, 2, True)
        assert (parsed.gradient_allreduce_op, parsed.optimizer_name, parsed.dump_state) == ("mean", "AdamW", False)
        assert parsed.optimizer_params == config["optimizer"]["params"] and parsed.scheduler_params is None
        assert parsed.zero_config.stage == ZeroStageEnum.gradients
        assert parsed.zero_config.prefetch_bucket_size == 3686.4 and parsed.zero_config.reduce_scatter
        with pytest.raises(AttributeError):
            parsed.zero_config.nothing_of_that_name
        with pytest.raises(AttributeError):
            parsed.nothing_of_that_name
    assert DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "SUM"}).gradient_allreduce_op == "sum"
    old = types.SimpleNamespace(deepscale_config=str(tmp_path / "ds.json"))
    engine = initialize(args=old, model=make_model())[0]
    assert engine.zero_optimization_stage() == 2
    engine.destroy()
    for wrong in (None, {"zero_optimization": {"stage": 4}}, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}):
        with pytest.raises(strata.ConfigError):
            initialize(model=make_model(), config=wrong)
    with pytest.raises(strata.UsageError, match="mpu"):
        initialize(model=make_model(), config=config, mpu=object())
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(strata.ConfigError, match="auto"):
        initialize(args=types.SimpleNamespace(deepspeed_config=_config(1, optimizer=optimizer)), model=make_model())


def test_defaults_of_frameworks_count_as_under_deepspeed(caplog):
    config = _config(2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}})
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "nvme_path": None}
    given = copy.deepcopy(config)
    with caplog.at_level(logging.WARNING, "strata"):
        engine, optimizer, *_ = initialize(model=make_model(), config=config)
    assert config == given and engine.config is config
    for word in ("weights are sharded at stage 3 alone", "warmup_num_steps is 0"):
        assert word in caplog.text
    masters = optimizer.fp32_partitioned_groups_flat
    assert [m.shape for m in masters] == [(sum(p.numel() for p in engine.module.parameters()),)]
    assert masters[0].dtype == torch.float32
    for also in (optimizer.single_partition_of_fp32_groups, optimizer.fp32_groups_flat):
        assert torch.equal(also[0], masters[0])
    engine.destroy()


def _communicates():
    rank, world = rank_and_world()
    assert (communication.get_rank(), communication.get_world_size(), communication.get_local_rank()) == (0, 1, rank)
    communication.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    communication.init_distributed()
    assert communication.is_initialized() and communication.get_world_size() == world
    assert communication.get_all_ranks_from_group() == list(range(world))
    assert communication.get_rank() == rank and communication.one() == 1 and communication.zero() == 0
    with pytest.raises(strata.UsageError, match="strata.sequence_parallel.size"):
        groups.get_sequence_parallel_group()
    assert groups.get_sequence_parallel_world_size() == 1 and groups.get_data_parallel_world_size() == world
    assert communication.get_world_group() is not None
    torch.distributed.barrier()  # the other rank may still be connecting


def test_comm_is_torchs():
    run_ranks(2, _communicates)


def test_tensors_in_lists_and_dicts():
    base = torch.arange(100.0)
    item = {"a": [base[:2], (base[2:4], "text")], "b": 3}
    copied = script_functions.clone_tensors_for_torch_save(item)
    assert copied["a"][0].untyped_storage().nbytes() == 8 and copied["a"][1][1] == "text" and copied["b"] == 3
    moved = script_functions.move_to_device(item, "meta", lambda tensor: tensor[0] == 2)
    assert moved["a"][1][0].is_meta and not moved["a"][0].is_meta


def test_models_are_built_where_and_in_what_is_asked():
    with accelerator.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 3)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32 and not torch.nn.Linear(2, 3).weight.is_meta


def test_activations_are_computed_again():
    calls = []

    def twice(x):
        calls.append(1)
        return x.sin().sin()

    x = torch.ones(3, requires_grad=True)
    checkpointing.configure(mpu_=None)
    assert checkpointing.is_configured()
    checkpointing.checkpoint(twice, x).sum().backward()
    outputs = []
    checkpointing.CheckpointFunction.apply(twice, outputs, x)
    assert len(calls) == 3 and outputs[0].shape == (3,)
    with pytest.raises(NotImplementedError, match="partition_activations"):
        checkpointing.configure(partition_activations=True)


def test_small_functions_of_scripts(tmp_path, caplog):
    device = accelerator.get_accelerator()
    assert device.device_name() in ("cpu", "cuda") and device.current_device_name().startswith(device.device_name())
    assert device.total_memory() > 0 and device.communication_backend_name() in ("gloo", "nccl")
    with pytest.raises(NotImplementedError, match="graph"):
        device.create_graph()
    groups_of = [{"params": list(make_model().parameters())}]
    assert script_functions.split_params_into_different_moe_groups_for_optimizer(groups_of) == groups_of
    scaler = checkpointing.DynamicLossScaler(8.0)
    assert pickle.loads(pickle.dumps(scaler)).loss_scale == 8.0
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert script_functions.get_grad_norm([parameter]) == 4.0 and script_functions.get_weight_norm(parameter) == 2.0
    script_functions.set_log_level_from_string("info")
    assert script_functions.should_log_le("info") and not script_functions.should_log_le("debug")
    accelerator.see_memory_usage("here", force=True)
    assert "here" in caplog.text
    for rank in (10, 9):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [name[-27:-24] for name in checkpointing.get_optim_files(str(tmp_path))] != []
    assert "_9_" in checkpointing.get_optim_files(str(tmp_path))[0]
    with pytest.raises(FileNotFoundError, match="consolidate"):
        checkpointing.get_model_state_file(str(tmp_path), 3)
