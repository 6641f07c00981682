"""The stand-in for ``deepspeed``: imports that find it, its cost, and its refusals. Each test has a fresh process."""

import subprocess
import sys

import pytest
from launching import environment_of, run, with_pth
from soak import also

QUESTIONS = """
import importlib.metadata, importlib.util, sys
import strata.compat.deepspeed
import deepspeed
from deepspeed import DeepSpeedEngine
version = deepspeed.__version__
assert version.startswith("0.19.8+strata.") and deepspeed.version == version
assert importlib.metadata.version("deepspeed") == version == importlib.metadata.metadata("deepspeed")["Version"]
assert importlib.util.find_spec("deepspeed").loader is not None
assert "deepspeed" in importlib.metadata.packages_distributions()["deepspeed"]
assert not isinstance(object(), DeepSpeedEngine)
import deepspeed.runtime.zero
assert deepspeed.zero is deepspeed.runtime.zero
assert not {"torch", "strata._C", "numpy", "ctypes"} & set(sys.modules), "more was imported than was asked for"
"""

EVERY_NAME = """
import importlib, sys
import strata.compat.deepspeed
from strata.compat.names import MODULES, Refusal
for path, names in MODULES.items():
    module = importlib.import_module(f"deepspeed.{path}" if path else "deepspeed")
    for name, target in names.items():
        found = getattr(module, name)
        if isinstance(target, Refusal):
            class Mine(found):
                pass
            try:
                found(1, two=2)
            except NotImplementedError as error:
                assert f"{name}: Strata does not offer " in str(error), error
            else:
                raise AssertionError(name)
"""


def python(script, code=0, environment=None):
    return run([sys.executable, "-c", script], environment or environment_of(), code)


def test_frameworks_find_it_and_nothing_else_is_imported():
    python(QUESTIONS)


def test_the_switch_imports_a_handful_of_modules():
    """Every process imports them at its start: each module costs about a millisecond; the goal for all is 30."""
    script = "import sys; first = set(sys.modules); import strata.compat.deepspeed; print(*(set(sys.modules) - first))"
    imported = python(script).split()
    assert "strata.compat.activation" in imported and len(imported) <= 15, imported


def test_every_name_is_there_and_what_is_not_offered_says_so_when_it_is_called():
    python(EVERY_NAME)


def test_transformers_and_accelerate_take_it_for_deepspeed():
    python("import strata.compat.deepspeed\nimport transformers.trainer\nfrom accelerate.utils import DummyOptim\n"
           "from transformers.integrations.deepspeed import is_deepspeed_available\nassert is_deepspeed_available()\n"
           "from transformers.integrations import HfDeepSpeedConfig\nHfDeepSpeedConfig({'zero_optimization': {}})")


def test_an_unknown_name_is_an_error_that_says_where_to_look():
    text = python("import strata.compat.deepspeed\nfrom deepspeed.zero import Nothing", code=1)
    assert "cannot import name 'Nothing'" in text
    text = python("import strata.compat.deepspeed, deepspeed\ndeepspeed.zero.Nothing", code=1)
    assert "MIGRATING.md" in text
    text = python("import strata.compat.deepspeed\nimport deepspeed.nothing", code=1)
    assert "has no module 'deepspeed.nothing'" in text and "MIGRATING.md" in text


@pytest.mark.parametrize("first, said", [
    ("import accelerate", "'accelerate.utils' was imported first"),
    *also(("import transformers.trainer", "was imported first")),
    ("import types, sys; sys.modules['deepspeed'] = types.ModuleType('deepspeed')", "DeepSpeed  was imported first"),
])  # fmt: skip
def test_what_comes_too_late_is_refused_with_the_import_that_came_first(first, said):
    text = python(f"{first}\nimport strata.compat.deepspeed", code=1)
    assert said in text and "as the first line of the script" in text and "strata run" in text


def test_the_environment_switches_it_on_in_every_process(tmp_path):
    environment = with_pth(tmp_path, environment_of(STRATA_COMPAT="deepspeed"))
    script = "import deepspeed; assert '+strata.' in deepspeed.__version__"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    python(child, environment=environment)
    off = {name: value for name, value in environment.items() if name != "STRATA_COMPAT"}
    python("import sys; assert 'strata' not in sys.modules", environment=off)
    wrong = subprocess.run([sys.executable, "-c", ""], env={**environment, "STRATA_COMPAT": "megatron"},
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert "STRATA_COMPAT=megatron: Strata stands in for 'deepspeed' alone" in wrong.stderr


def test_scripts_get_local_rank_where_they_name_it(tmp_path):
    asks = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--local_rank', type=int, default=-1)\n"
    (tmp_path / "asks.py").write_text(asks + "print('rank', p.parse_args().local_rank)")
    (tmp_path / "plain.py").write_text("import sys; print(sys.argv[1:], __name__, __file__ == sys.argv[0])")
    start = [sys.executable, "-m", "strata.compat.run"]
    environment = environment_of(LOCAL_RANK="3")
    assert run([*start, tmp_path / "asks.py"], environment) == "rank 3\n"
    assert run([*start, "--no_local_rank", tmp_path / "asks.py"], environment) == "rank -1\n"
    assert run([*start, tmp_path / "plain.py", "--a", "-m"], environment) == "['--a', '-m'] __main__ True\n"
    module = {**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    assert run([*start, "--module", "plain", "x"], module) == "['x'] __main__ True\n"


def test_operators_can_be_asked_for():
    ask = "import strata.compat.deepspeed, deepspeed\nfrom deepspeed.ops.aio import AsyncIOBuilder as builder\n"
    ask += "assert deepspeed.ops.__compatible_ops__[builder.NAME] and builder().is_compatible()\n"
    text = python(ask + "deepspeed.ops.op_builder.CPUAdamBuilder().load()", code=1)
    assert "NotImplementedError" in text and "Strata has its own" in text
