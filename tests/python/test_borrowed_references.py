"""The engine looks at the outputs of modules while Python runs, which may drop them meanwhile."""

import os
import subprocess
import sys

import pytest
from soak import also

SCRIPT = """
import sys

import strata
import torch


class Leaves:
    "A dataclass, as far as one can see, that drops itself when it is looked at."

    def __init__(self, holder):
        self.holder = holder

    @property
    def __dataclass_fields__(self):
        self.holder.clear()
        return {}


class Model(torch.nn.Linear):
    def forward(self, x):
        self.product = super().forward(x)
        holder = [] if sys.argv[1] == "list" else {}
        leaves = Leaves(holder)
        if sys.argv[1] == "list":
            holder.append(leaves)
        else:
            holder["leaves"] = leaves
        return holder


config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
engine = strata.initialize(model=Model(4, 4), config=config)[0]
assert len(engine(torch.ones(1, 4))) == 0
engine.destroy()
print("alive")
"""


@pytest.mark.parametrize("container", ["dict", *also("list")])
def test_an_output_may_go_while_it_is_looked_at(container):
    """The allocator overwrites freed memory, so a use of it ends the process."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SCRIPT, container], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-2000:])
