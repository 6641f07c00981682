"""bench/start_story.py on two ranks beside DeepSpeed, which compiles its optimizer for minutes where it has not yet."""

import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "bench"), str(TESTS.parent / "bench")]

from story_jobs import has_deepspeed  # noqa: E402
from test_start_story import compare  # noqa: E402


@pytest.mark.skipif(not has_deepspeed() or shutil.which("ninja") is None, reason="DeepSpeed or ninja is not installed")
def test_both_start_the_same_model_from_an_unchanged_script(tmp_path):
    compare(tmp_path, 2, ["strata", "deepspeed"])
