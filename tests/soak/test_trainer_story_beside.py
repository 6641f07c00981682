"""bench/trainer_story.py on two ranks beside DeepSpeed, whose optimizer compiles for minutes the first time."""

import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "bench"), str(TESTS.parent / "bench")]

from story_jobs import has_deepspeed  # noqa: E402
from test_trainer_story import compare  # noqa: E402

pytest.importorskip("trl")


@pytest.mark.skipif(not has_deepspeed() or shutil.which("ninja") is None, reason="DeepSpeed or ninja is not installed")
def test_both_train_the_same(tmp_path):
    figures = compare(tmp_path, 2, ["strata", "deepspeed"], ["trainer", "grpo"], 3)
    ours, theirs = (figures["grpo"][engine]["logged"][0] for engine in ("strata", "deepspeed"))
    assert ours["reward"] == theirs["reward"]  # of the first round; sampled tokens part where two are as likely
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
