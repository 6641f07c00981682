"""``axolotl.cli.train``, which `axolotl train` starts on each rank, on a machine without a GPU.

axolotl asks CUDA whether devices reach each other's memory before it looks for a device.
"""

import runpy
import sys

import torch

torch.cuda.can_device_access_peer = lambda *_: False
sys.argv[0] = "axolotl.cli.train"
runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)
