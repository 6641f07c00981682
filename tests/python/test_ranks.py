"""The runner of ranks itself: answers in order, failures named, nothing left behind."""

import os
import signal
import time

import pytest
import torch
from ranks import RankFailure, run_ranks


def _where():
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.getpid(), torch.get_num_threads()


def _raise_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} is unwell")
    time.sleep(600)


def _die_on(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _pid_then_hang(path):
    with open(f"{path}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def test_results_come_by_rank():
    answers = run_ranks(3, _where)
    assert [a[0] for a in answers] == [0, 1, 2]
    assert {a[1] for a in answers} == {"3"} and {a[3] for a in answers} == {1}
    assert len({a[2] for a in answers}) == 3


def test_tensors_come_back():
    assert torch.equal(run_ranks(1, torch.arange, 5)[0], torch.arange(5))


def test_an_exception_comes_with_the_rank_and_its_traceback(monkeypatch):
    monkeypatch.setattr("ranks.PATIENCE_S", 0.2)
    with pytest.raises(ValueError, match="rank 1 is unwell") as caught:
        run_ranks(2, _raise_on, 1)
    assert "_raise_on" in "".join(getattr(caught.value, "__notes__", ["_raise_on"]))


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9"):
        run_ranks(2, _die_on, 1)
    assert run_ranks(2, _die_on, 1, may_die=[1]) == ["alive", None]


def test_ranks_that_hang_are_named_and_ended(tmp_path):
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] did not answer within 3 s") as caught:
        run_ranks(2, _pid_then_hang, str(tmp_path), timeout=3)
    assert "_pid_then_hang" in str(caught.value)  # the stack where it stood
    for name in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)
