"""The conformance suite of the Collectives seam (tests/comm/collectives_conformance.h) on gloo."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

SHARDS = 4


def _run_shard():
    """(exit code, end of the output) of a shard of the suite, the one that has the number of this process."""
    os.environ |= {"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": os.environ["RANK"]}
    code = run_suite()
    return code, Path("/proc/self/fd/1").read_text(errors="replace")[-4000:]


def run_suite():
    import c10d_conformance

    stores = {}

    def make_backend(rank, world_size, timeout_s, group):
        store = stores.setdefault(group, dist.HashStore())
        timeout = datetime.timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        backend = dist.ProcessGroupGloo(dist.PrefixStore(str(group), store), rank, world_size, timeout)
        # A rank that ends at once must not close a socket to which another is still connecting.
        store.set(f"{group} connected {rank}", "")
        store.wait([f"{group} connected {r}" for r in range(world_size)])
        return backend, store

    return c10d_conformance.run(make_backend, "*")


def test_gloo_keeps_the_contract_of_collectives():
    # In processes of their own: ranks are threads there, with many groups that break on purpose. Torch's flight
    # recorder is off, since it notes new groups in a map that the threads of one process share without a lock.
    # The suite waits for deadlines most of its time, so GoogleTest divides it among processes that wait together.
    environment = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    for code, output in run_ranks(SHARDS, _run_shard, timeout=300.0, env=environment):
        assert code == 0, output


@pytest.mark.soak
def test_a_process_with_many_groups_over_gloo_ends():
    """The ranks above end without the interpreter's own end, which destroys what is left of the groups."""
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
                                "GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": "0"}  # fmt: skip
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    sys.exit(run_suite())
