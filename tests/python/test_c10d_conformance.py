"""The conformance suite of the Collectives seam (tests/comm/collectives_conformance.h) on gloo."""

import datetime
import os
import subprocess
import sys

import torch.distributed as dist


def run_suite():
    import c10d_conformance

    stores = {}

    def make_backend(rank, world_size, timeout_s, group):
        store = stores.setdefault(group, dist.HashStore())
        timeout = datetime.timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        backend = dist.ProcessGroupGloo(dist.PrefixStore(str(group), store), rank, world_size, timeout)
        # A rank that ends at once must not close what another is still connecting to.
        store.set(f"{group} connected {rank}", "")
        store.wait([f"{group} connected {r}" for r in range(world_size)])
        return backend, store

    return c10d_conformance.run(make_backend, "*")


def test_gloo_keeps_the_contract_of_collectives():
    # In a process of its own: ranks are threads there, with many groups that break on purpose. Torch's flight
    # recorder is off, since it notes new groups in a map that the threads of one process share without a lock.
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    sys.exit(run_suite())
