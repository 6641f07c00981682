"""The supported versions of transformers: one place names them, others are refused, and all used parts of them exist.

`make test-transformers VERSION=...` runs these tests, and those of loading and saving, with another version.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import strata
from hf_models import MODELS
from packaging.requirements import Requirement
from strata.checkpoint import supported_transformers
from strata.checkpoint.supported_transformers import GENERATIONS, adapter, private, requirement, unsupported
from tiny_models import config_of, make_engine

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = {module for generation in GENERATIONS for module in generation.private}
REFUSED = ["4.54.1", "5.2.0", "5.25.0", "5.25.0.dev0", "6.0.0"]


def test_private_names_of_the_installed_version_are_there():
    (generation,) = (one for one in GENERATIONS if one.adapter == adapter().__name__.rpartition(".")[2])
    assert all(private(name) for names in generation.private.values() for name in names)
    model = MODELS["qwen3"].build()
    code = "".join(inspect.getsource(module) for module in (adapter(), inspect.getmodule(adapter().tie)))
    attributes = {*re.findall(r"\b(?:model|cls)\.(\w+[a-z])\b", code), "_from_config",
                  "_keys_to_ignore_on_save", "_keys_to_ignore_on_load_unexpected"}  # fmt: skip
    assert len(attributes) > 6
    for name in attributes - {"_weight_conversions"}:  # Strata sets it, and so does from_pretrained
        assert hasattr(model, name), name


def test_every_adapter_has_the_same_functions():
    wanted = re.findall(r"^    (\w+)\(.*\)", supported_transformers.__doc__, re.M)
    assert len(wanted) == 7
    for generation in GENERATIONS:
        module = import_module(f"strata.checkpoint.{generation.adapter}")
        of_first = import_module(f"strata.checkpoint.{GENERATIONS[0].adapter}")
        for name in wanted:
            parameters = [*inspect.signature(getattr(module, name)).parameters]
            assert parameters == [*inspect.signature(getattr(of_first, name)).parameters], (generation, name)


def test_nothing_private_is_used_past_the_tables():
    package = Path(strata.__file__).resolve().parent
    modules = "|".join(MODULES)
    past = re.compile(rf"^\s*(from|import) transformers(\.({modules})|\b.* import ({modules})\b)", re.M)
    assert [path for path in package.rglob("*.py") if past.search(path.read_text())] == []


def test_packaging_asks_for_the_versions_that_are_supported(monkeypatch):
    assert f'"{requirement()}"' in (REPOSITORY / "pyproject.toml").read_text()
    pinned = re.search(r"^transformers==(\S+)", (REPOSITORY / "requirements.txt").read_text(), re.M).group(1)
    asked = Requirement(requirement()).specifier
    ends = ["{}.{}.1".format(*end) for one in GENERATIONS for end in (one.oldest, one.newest)]
    for version, supported in [(pinned, True), *((v, True) for v in ends), *((v, False) for v in REFUSED)]:
        monkeypatch.setattr(supported_transformers, "installed", lambda version=version: version)
        assert (unsupported() is None) == supported == asked.contains(version), version


@pytest.mark.parametrize("version", REFUSED)
def test_another_version_is_refused_with_what_to_do(version, monkeypatch, tmp_path):
    MODELS["qwen3"].build().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(supported_transformers, "installed", lambda: version)
    wanted = f"wanted .* to 5.24, found transformers {version}. A model that the script builds trains.*pip install"
    with pytest.raises(strata.UsageError, match=wanted):
        strata.load_pretrained(tmp_path / "model", config_of(2))


def test_who_trains_with_another_version_learns_at_the_start_that_saving_will_fail(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(supported_transformers, "installed", lambda: "5.99.0")
    model = MODELS["qwen3"].build()
    model.save_pretrained(tmp_path / "model")
    engine = make_engine(model, config_of(2))
    assert "save_pretrained and load_weights will refuse this model" in caplog.text
    with pytest.raises(strata.UsageError, match="found transformers 5.99.0"):
        engine.save_pretrained(tmp_path / "saved")
    with pytest.raises(strata.UsageError, match="found transformers 5.99.0"):
        strata.load_weights(engine, tmp_path / "model")
    monkeypatch.undo()
    engine.save_pretrained(tmp_path / "saved")
    engine.destroy()
    assert (tmp_path / "saved" / "model.safetensors").exists()
