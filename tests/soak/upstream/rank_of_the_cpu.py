"""Changes DeepSpeed's test ranks: each finds as many devices as it may need. A pytest outcome that a rank raises
reaches the test; without the change it ends the rank without a word, and the other ranks wait for it."""

import functools

import deepspeed.accelerator
from _pytest.outcomes import OutcomeException, Skipped
from unit.common import DistributedExec

_run = DistributedExec._dist_run


@functools.wraps(_run)
def _told(self, *args, **kwargs):
    try:
        return _run(self, *args, **kwargs)
    except Skipped:
        raise
    except OutcomeException as outcome:
        raise AssertionError(str(outcome)) from None


DistributedExec._dist_run = _told
type(deepspeed.accelerator.get_accelerator()).device_count = lambda self: 16
