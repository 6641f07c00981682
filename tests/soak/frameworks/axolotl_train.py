"""``axolotl.cli.train``, which `axolotl train` starts on each rank, on a machine without a GPU.

axolotl asks CUDA whether devices reach each other's memory before it looks for a device, and gives each of several
ranks the GPU of its number. Accelerate does not connect ranks where it finds no GPU and the user has not asked for the
CPU; axolotl's configuration has no setting for that.
"""

import runpy
import sys

import torch
from accelerate import PartialState
from axolotl.loaders.model import ModelLoader

choose_backend, choose_place = PartialState._prepare_backend, ModelLoader._set_device_map_config


def on_the_host(loader):
    choose_place(loader)
    if "device_map" in loader.model_kwargs:
        loader.model_kwargs["device_map"] = {"": "cpu"}


torch.cuda.can_device_access_peer = lambda *_: False
PartialState._prepare_backend = lambda self, cpu, *more: choose_backend(self, True, *more)
ModelLoader._set_device_map_config = on_the_host
sys.argv[0] = "axolotl.cli.train"
runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)
