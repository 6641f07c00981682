"""The conformance suite of the Collectives seam (tests/comm/collectives_conformance.h) on gloo."""

import datetime

import torch.distributed as dist


def test_gloo_keeps_the_contract_of_collectives():
    import c10d_conformance

    stores = {}

    def make_backend(rank, world_size, timeout_s, group):
        store = stores.setdefault(group, dist.HashStore())
        timeout = datetime.timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        backend = dist.ProcessGroupGloo(dist.PrefixStore(str(group), store), rank, world_size, timeout)
        return backend, store

    assert c10d_conformance.run(make_backend, "*") == 0
