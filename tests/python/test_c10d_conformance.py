"""The conformance suite of the Collectives seam (tests/comm/collectives_conformance.h) on gloo."""

import datetime
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

SHARDS = 4


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
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    shards = [{"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": str(i)} for i in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as pool:
        for done in pool.map(lambda shard: _run(environment | shard), shards):
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _run(environment):
    return subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300,
                          check=False)


if __name__ == "__main__":
    sys.exit(run_suite())
