"""DeepSpeedEngine's public names one by one: each is there, refused by name, or internal for a stated reason."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import strata
import torch
from ranks import run_ranks
from strata.compat.engine import DeepSpeedEngine, initialize
from strata.compat.names import REFUSED_METHODS
from tiny_models import config_of, loss_of, make_batches, make_engine, make_model, rank_and_world, same_bits

_BUCKETS = "a step of DeepSpeed's own all-reduce; gradients are reduced as they come"
_BACKENDS = "makes a backend of DeepCompile or its passes, which engine.compile() refuses"
INTERNAL = {
    "all_gather_scalar": _BUCKETS,
    "allreduce_and_copy": _BUCKETS,
    "allreduce_bucket": _BUCKETS,
    "allreduce_no_retain": _BUCKETS,
    "buffered_allreduce_fallback": _BUCKETS,
    "sparse_all_gather": _BUCKETS,
    "sparse_allreduce": _BUCKETS,
    "sparse_allreduce_bucket": _BUCKETS,
    "sparse_allreduce_no_retain": _BUCKETS,
    "clip_fp32_gradients": "a part of step() at stage 0; step() clips",
    "get_autosp_backend": _BACKENDS,
    "get_autotp_backend": _BACKENDS,
    "get_deepcompile_backend": _BACKENDS,
    "get_deepspeed_compile_backend": _BACKENDS,
    "get_optimizer_configuration": "a part of initialize()",
    "is_first_weights_partition_group": "says who writes one of DeepSpeed's checkpoint files",
    "print_forward_breakdown": "prints times of layers of experts, which are not offered",
}
# Values that differ from DeepSpeed's under a configuration that does not set them, and why.
OTHER_DEFAULTS = {
    "aio_config": "the engine's own queue depth; two settings that have no effect are left out",
    "curriculum_learning_config": "a feature that is off says no more than that",
    "data_efficiency_config": "a feature that is off says no more than that",
    "data_sampling_config": "a feature that is off says no more than that",
    "random_ltd_config": "a feature that is off says no more than that",
    "dynamic_loss_scale": "DeepSpeed says so without fp16, too",
    "loss_scale": "DeepSpeed says 0.0, dynamic, without fp16",
    "zero_max_live_parameters": "bytes bound it, unless the configuration says a number of elements",
    "zero_max_reuse_distance": "the learned order of fetches decides",
    "zero_overlap_comm": "the engine decides where the configuration does not",
    "zero_param_persistence_threshold": "small parameters are gathered with their block",
}

_WALK = """
import inspect, json
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
engine.__dict__["_config"] = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2})
found = {}
for name, value in vars(DeepSpeedEngine).items():
    if name.startswith("_"):
        continue
    method = value.__func__ if isinstance(value, staticmethod) else value
    arguments = list(inspect.signature(inspect.unwrap(method)).parameters) if callable(method) else None
    entry = found[name] = {"arguments": arguments}
    if arguments == ["self"] and "return self._config" in inspect.getsource(method):
        try:
            entry["value"] = json.loads(json.dumps(getattr(engine, name)()))
        except Exception:
            pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def theirs():
    """{name: {"arguments": [str] or None of a property, "value": a getter's value for an empty configuration}}."""
    pytest.importorskip("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "STRATA_COMPAT": ""}
    done = subprocess.run([sys.executable, "-c", _WALK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _getters(names):
    engine, *_ = initialize(model=make_model(), config={"train_micro_batch_size_per_gpu": 2})
    values = {name: json.loads(json.dumps(getattr(engine, name)())) for name in names}
    engine.destroy()
    return values


def test_each_name_is_there_or_refused_or_internal(theirs):
    assert len(theirs) > 170
    given = {name for name in theirs if hasattr(DeepSpeedEngine, name)}
    assert sorted(set(theirs) - given) == sorted(INTERNAL)
    assert given >= REFUSED_METHODS.keys()


def test_arguments_are_taken_in_their_order(theirs):
    for name, entry in theirs.items():
        if entry["arguments"] is None or name in INTERNAL or name in REFUSED_METHODS:
            continue
        ours = list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters)
        wanted = [a for a in entry["arguments"] if a not in ("args", "kwargs")]
        assert ours[: len(wanted)] == wanted, name


def test_getters_say_what_deepspeed_says_of_an_empty_configuration(theirs):
    names = [name for name, entry in theirs.items() if "value" in entry and name not in INTERNAL]
    ours = run_ranks(1, _getters, names)[0]
    different = {name for name in names if ours[name] != theirs[name]["value"]}
    assert len(names) > 60 and different <= OTHER_DEFAULTS.keys(), {
        name: (ours[name], theirs[name]["value"]) for name in different - OTHER_DEFAULTS.keys()
    }


# --- arguments that scripts pass ---


def _loads_data():
    rank, world = rank_and_world()
    data = torch.arange(10).float().unsqueeze(1)
    engine, _, loader, _ = initialize(
        model=make_model(), config={"train_micro_batch_size_per_gpu": 2}, training_data=data, collate_fn=torch.stack)
    assert engine.training_dataloader is loader and loader.batch_size == 2 and loader.collate_fn is torch.stack
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append(torch.cat(list(loader)).flatten().tolist())
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    for route in ("eval", "predict"):
        kept = engine.deepspeed_io(data, 3, route, False, None, lambda rows: torch.stack(rows) * 2.0, 0)
        assert torch.cat(list(kept)).flatten().tolist() == [2.0 * i for i in range(rank, 10, world)]
        assert kept.batch_size == 3 and not kept.pin_memory
    own = engine.deepspeed_io(data, data_sampler=torch.utils.data.SequentialSampler(data))
    assert torch.cat(list(own)).flatten().tolist() == list(range(10)) and own.collate_fn is torch.stack
    for given, told in (((data, torch.stack), "batch_size is the second"), ((data, 0), "batch_size"),
                        ((data, 1, "test"), "route"), ((iter([1]),), "IterableDataset")):
        with pytest.raises(strata.UsageError, match=told):
            engine.deepspeed_io(*given)
    engine.set_data_post_process_func(len)
    assert loader.post_process_func is len
    engine.destroy()


def test_data_is_loaded_with_deepspeeds_arguments():
    run_ranks(2, _loads_data)


def _state_dicts():
    rank, world = rank_and_world()
    for stage in (0, 3):
        model = make_model()
        model.layers[0].up.bias.requires_grad_(False)
        engine = make_engine(model, config_of(stage))
        into = {"mine": 1}
        found = engine.module_state_dict(into, "model.", True, True)
        names = set(make_model().state_dict()) - {"layers.0.up.bias"}
        assert found is into and set(found) == {"mine", *(f"model.{n}" for n in names)}
        assert found["model.head.weight"].requires_grad == (stage == 0)
        whole = {name: value.detach().clone() for name, value in engine.module_state_dict().items()}
        changed = {"module": {name: value + 1 for name, value in whole.items() if name != "head.bias"}}
        with pytest.raises(strata.UsageError, match="missing .'head.bias'"):
            engine.load_module_state_dict(changed)
        engine.load_module_state_dict(changed, True, None, True, None, ["head.bias"])
        after = engine.module_state_dict()
        assert same_bits(after["head.weight"], whole["head.weight"] + 1)
        assert same_bits(after["head.bias"], whole["head.bias"])
        engine.load_module_state_dict({"module": whole}, custom_load_fn=_double)
        engine.backward(loss_of(engine, make_batches(1, world)[0][rank]))
        assert same_bits(strata.utils.safe_get_full_fp32_param(model.head.weight).cpu(), whole["head.weight"] * 2)
        engine.step()
        engine.allreduce_gradients(bucket_size=5)
        engine.destroy()


def _double(src, dst):
    assert dst.head.weight.shape == src["head.weight"].shape
    with torch.no_grad():
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name] * 2)


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_take_deepspeeds_arguments(world):
    run_ranks(world, _state_dicts)


def _of_parameters():
    engine = make_engine(make_model(), config_of(3))
    sizes = {}
    for name, parameter in engine.module.named_parameters():
        told = parameter.ds_summary()
        sizes[name] = parameter.partition_numel()
        assert told["ds_tensor.shape"] == parameter.ds_tensor.shape == (sizes[name],)
        assert told["id"] == parameter.ds_id and told["ds_shape"] == tuple(parameter.ds_shape)
        assert parameter.ds_numel == 0 or (told["numel"] == 0) == (told["status"] == "NOT_AVAILABLE")
        assert parameter.ds_summary(use_debug_name=True)["id"] == name
    engine.destroy()
    return sizes


@pytest.mark.parametrize("world", [1, 3])
def test_parameters_tell_of_their_parts(world):
    by_rank = run_ranks(world, _of_parameters)
    for name, parameter in make_model().named_parameters():
        assert sum(sizes[name] for sizes in by_rank) == parameter.numel()


def _random_numbers_and_gates(function):
    torch.manual_seed(3)
    x, gate = torch.ones(4, 4, requires_grad=True), torch.full((4,), 2.0, requires_grad=True)
    results = function(lambda x, scale, gate=None: (torch.nn.functional.dropout(x * gate, 0.5) * scale,), x, 3.0, gate)
    (results[0] if isinstance(results, tuple) else results).sum().backward()
    return x.grad, gate.grad


def test_checkpointed_functions_take_keywords():
    from strata.compat import checkpointing

    plain = _random_numbers_and_gates(lambda function, x, scale, gate: function(x, scale, gate=gate))
    ours = _random_numbers_and_gates(
        lambda function, x, scale, gate: checkpointing.checkpoint(function, x, scale=scale, gate=gate))
    assert all(same_bits(a, b) for a, b in zip(plain, ours)) and plain[1].abs().sum() > 0
    names = {"use_reentrant": 1, "debug": 2, "context_fn": 3}  # the function's own, whatever torch calls its options
    assert checkpointing.checkpoint(lambda **given: [given, 4], **names) == (names, 4)
