"""zero.Init with every parameter recorded: twenty architectures and more on 1, 2 and 3 ranks, beside plain ones."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

from many_models import MODELS, build  # noqa: E402
from replayed_models import compare_worlds  # noqa: E402


def test_twenty_architectures_have_the_same_values_on_any_number_of_ranks():
    assert len(MODELS) >= 20
    compare_worlds({name: partial(build, name) for name in MODELS})
