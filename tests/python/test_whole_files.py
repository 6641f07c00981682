"""Files that Python writes are there whole or not at all, follow no link, and leave nothing behind."""

import os
import resource
import threading

import pytest
import strata
import torch
from strata import _C
from strata.checkpoint.whole_files import place_script, save_whole_file


@pytest.fixture
def victim(tmp_path):
    """A file that no link may lead to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def folder(tmp_path):
    """A folder in which another user may leave links."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_weights_follow_no_link(folder, victim):
    for name in ("model.bin", "model.bin.part", "model.bin.partial"):
        (folder / name).symlink_to(victim)
    save_whole_file({"weight": torch.ones(3)}, str(folder / "model.bin"))
    assert not (folder / "model.bin").is_symlink()
    assert torch.load(folder / "model.bin")["weight"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(folder)) == ["model.bin", "model.bin.part", "model.bin.partial"]


def test_weights_that_cannot_be_written_leave_what_was_there_and_nothing_else(folder):
    save_whole_file({"weight": torch.ones(3)}, str(folder / "model.bin"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(strata.IoError, match="cannot write '.*model.bin'.*make room"):
            save_whole_file({"weight": torch.ones(1_000_000)}, str(folder / "model.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(TypeError):  # an object that cannot be pickled is the caller's error
        save_whole_file({"lock": threading.Lock()}, str(folder / "model.bin"))
    assert os.listdir(folder) == ["model.bin"]
    assert torch.load(folder / "model.bin")["weight"].tolist() == [1, 1, 1]


def test_the_script_follows_no_link(folder, victim):
    for name in ("zero_to_fp32.py", f"zero_to_fp32.py.{os.getpid()}.part"):
        (folder / name).symlink_to(victim)
    place_script(folder)
    script = folder / "zero_to_fp32.py"
    assert not script.is_symlink() and "strata.utils.zero_to_fp32" in script.read_text()
    assert os.access(script, os.X_OK)
    place_script(folder)  # which is there
    assert len(os.listdir(folder)) == 2


def test_a_script_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    place_script(tmp_path / "nowhere")
    assert "cannot write" in caplog.text and "errno=2" in caplog.text


def test_an_atomic_file_ends_with_its_block(tmp_path):
    with _C.AtomicFile(str(tmp_path / "data")) as file:
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []
    with pytest.raises(strata.UsageError, match="ends with its 'with'"):
        file.publish()
