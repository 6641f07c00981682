"""The supported versions of transformers: one place names them, others are refused, and all used parts of them exist.

`make test-newest` runs these tests, and those of loading and saving, with the newest version.
"""

import re
from pathlib import Path

import pytest
import strata
from hf_models import MODELS
from strata.checkpoint import supported_transformers
from strata.checkpoint.supported_transformers import NEWEST, OLDEST, PRIVATE, private, requirement
from tiny_models import config_of, make_engine

REPOSITORY = Path(__file__).resolve().parents[2]


def test_what_is_used_is_there():
    names = [name for names in PRIVATE.values() for name in names]
    assert all(callable(private(name)) for name in names)
    model = MODELS["qwen3"].build()
    for name in ("base_model_prefix", "all_tied_weights_keys", "_keys_to_ignore_on_load_unexpected", "_from_config",
                 "_keys_to_ignore_on_save", "initialize_weights", "tie_weights"):
        assert hasattr(model, name), name


def test_nothing_private_is_used_past_the_table():
    package = Path(strata.__file__).resolve().parent
    modules = "|".join(PRIVATE)
    past = re.compile(rf"^\s*(from|import) transformers(\.({modules})|\b.* import ({modules})\b)", re.M)
    assert [path for path in package.rglob("*.py") if past.search(path.read_text())] == []


def test_packaging_asks_for_the_versions_that_are_supported():
    assert f'"{requirement()}"' in (REPOSITORY / "pyproject.toml").read_text()
    pinned = re.search(r"^transformers==(\d+)\.(\d+)\.", (REPOSITORY / "requirements.txt").read_text(), re.M)
    assert OLDEST <= tuple(map(int, pinned.groups())) <= NEWEST


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0", "5.25.0.dev0", "6.0.0", "4.57.6"])
def test_another_version_is_refused_with_what_to_do(version, monkeypatch, tmp_path):
    MODELS["qwen3"].build().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(supported_transformers, "installed", lambda: version)
    with pytest.raises(strata.UsageError, match=f"wanted 5.17 to 5.24, found transformers {version}.*pip install"):
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
