"""The modules that the package imports, seen in fresh processes: a start waits for every module."""

import subprocess
import sys

import pytest
import strata
from soak import also

TWO_STEPS = """
import sys
import torch
import strata

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "OPTIMIZER", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {}},
}
engine, *_ = strata.initialize(model=model, config=config)
for _ in range(4):
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
    engine.step()
assert engine.global_steps == 2
engine.optimizer.load_state_dict(engine.optimizer.state_dict())
"""


def _modules_after(script):
    script += "\nprint(*sys.modules)\nengine.destroy() if 'engine' in globals() else None"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def _of_strata(modules):
    return {name for name in modules if name.split(".")[0] == "strata"}


@pytest.mark.parametrize("optimizer", ["AdamW", *also("SGD", "Adagrad")])
def test_two_steps_import_nothing_of_torchs_compiler(optimizer):
    """880 modules, nearly four seconds, that torch imports when an optimizer is first made."""
    compiler = {"torch._dynamo", "torch._inductor", "sympy", "torch.fx.experimental.symbolic_shapes"}
    assert not _modules_after(TWO_STEPS.replace("OPTIMIZER", optimizer)) & compiler


def test_an_import_begins_nothing():
    script = "import sys, threading, strata; strata.load_pretrained; assert threading.active_count() == 1"
    modules = _modules_after(script)
    assert "strata.pretrained" in modules and not modules & {"transformers", "torch._dynamo"}


def test_what_not_every_script_uses_is_imported_when_it_is_asked_for():
    """Every script waits for the modules that the package imports at once, about a millisecond each."""
    assert _of_strata(_modules_after("import sys, strata")) == {"strata"}
    modules = _modules_after("import sys, strata; strata.initialize")
    ours = _of_strata(modules)
    assert "strata.engine" in ours and len(ours) <= 41, sorted(ours)
    assert not modules & {"transformers", "rich", "strata.pretrained", "strata.checkpoint.names"}
    used = "zero.Init, utils.logger, ops.lion, memory_forecast"
    later = _modules_after(f"import sys\nfrom strata import *\nassert all(({used}))")
    assert later >= {"strata.pretrained", "strata.forecast", "strata.zero"}


def test_the_public_names_stay():
    """Scripts import them; one may come, none may go."""
    kept = """CommError ConfigError DeviceError Engine Error FormatError InternalError IoError LossScaleError
        NumericsError OutOfMemoryError ScheduledLR ShardedOptimizer UsageError add_config_arguments init_distributed
        initialize load_pretrained load_weights memory_forecast ops schedule utils zero""".split()
    assert set(kept) <= set(strata.__all__)
    assert [name for name in strata.__all__ if not hasattr(strata, name)] == []
    assert callable(strata.initialize) and callable(strata.zero.Init)
