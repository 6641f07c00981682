"""Whole fp32 weights of a checkpoint, under the names that scripts import from DeepSpeed's ``utils.zero_to_fp32``.

The checkpoints are those of ``engine.save_checkpoint``, and DeepSpeed's own (stages 1 to 3, universal ones)."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from .. import _C
from ..checkpoint.whole_files import SavedTogether, file_bytes
from ..importing.deepspeed import read_deepspeed
from ..importing.whole_tensors import VALUE, find_own, read_own

_PICKLES = "pytorch_model.bin"  # of a checkpoint in one file


class LazyTensor:
    """A tensor, with its ``shape`` and ``dtype``, that is read when ``contiguous()`` asks for it."""

    def __init__(self, tensor):
        self._stored = tensor.kinds[VALUE]
        self.shape = torch.Size(tensor.shape)
        self.dtype = self._stored.dtype
        if tensor.role == "buffer" and self.dtype.is_floating_point:
            self.dtype = torch.float32

    def contiguous(self):
        """The tensor, on the host."""
        value = self._stored.read().reshape(self.shape).to(self.dtype).contiguous()
        part_of_more = value.untyped_storage().nbytes() > value.nbytes  # torch.save would write the whole storage
        return value.clone() if part_of_more else value


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False,
                                             lazy_mode=False):
    """{name: tensor on the host} of a checkpoint: master weights in fp32, frozen parameters and buffers in their own
    dtypes. Tied parameters are one tensor under all their names. IoError or FormatError where there is no such
    checkpoint, or it is damaged.

    Args:
        checkpoint_dir: folder of the checkpoints, or that of one.
        tag: default: the one that ``latest`` names.
        lazy_mode: return ``LazyTensor``s: ``.contiguous()`` reads one. The whole model is never in memory then.
    """
    result, own = {}, find_own(checkpoint_dir, tag)
    for tensor in (read_deepspeed(checkpoint_dir, tag, values_only=True) if own is None else read_own(own)).tensors:
        if tensor.role not in ("parameter", "buffer"):
            continue
        if tensor.role == "parameter" and not tensor.trainable and exclude_frozen_parameters:
            continue
        value = LazyTensor(tensor) if lazy_mode else LazyTensor(tensor).contiguous()
        result.update(dict.fromkeys([tensor.name, *tensor.aliases], value))
    return result


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB",
                                               safe_serialization=False, tag=None, exclude_frozen_parameters=False):
    """Writes the weights of a checkpoint, all floating ones in fp32, to files that Hugging Face's ``from_pretrained``
    and ``torch.load`` read. An earlier checkpoint in ``output_dir`` does not change until all of the new one is on
    disk. The new one then replaces it, also where it has the other format, since readers take either. Other files stay.

    Args:
        max_shard_size: bytes of one file at most, as a number or as "5GB"; None: one file.
        safe_serialization: write safetensors, a tensor at a time. Else write files of ``torch.save``; the contents of
            one file are in memory at a time.
        The others are ``get_fp32_state_dict_from_zero_checkpoint``'s.
    """
    lazy = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    most = sys.maxsize if max_shard_size is None else file_bytes(max_shard_size)
    (_write_safetensors if safe_serialization else _write_pickles)(lazy, os.fspath(output_dir), most)


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """``model``, which must not be under an engine, moved to the host, with the weights of a checkpoint."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(arguments=None):
    """The exit code of ``zero_to_fp32.py``'s command line ``arguments``."""
    parser = argparse.ArgumentParser(description="Writes the whole fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of the checkpoints, such as '.'")
    parser.add_argument("output_dir", help="folder for the weights; made if need be")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of one file at most, such as 5GB (default)")
    parser.add_argument("--safe_serialization", action="store_true",
                        help="write safetensors instead of torch.save's files")
    parser.add_argument("-t", "--tag", help="which checkpoint; default: the one that 'latest' names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    given = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(given.checkpoint_dir, given.output_dir, given.max_shard_size,
                                                   given.safe_serialization, given.tag, given.exclude_frozen_parameters)
    except (_C.FormatError, _C.IoError, _C.UsageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _dtype_of(lazy):
    return torch.float32 if lazy.dtype.is_floating_point else lazy.dtype


def _write_safetensors(state_dict, folder, most):
    specs = [(name, list(lazy.shape), _dtype_of(lazy)) for name, lazy in state_dict.items()]
    writer = _C.WeightsWriter(folder, specs, most)
    for index, lazy in enumerate(tqdm(state_dict.values(), desc="writing", unit="tensor", delay=1, disable=None)):
        writer.write(index, lazy.contiguous().to(_dtype_of(lazy)))
    writer.finish()


def _write_pickles(state_dict, folder, most):
    shards = _shards(state_dict, most)
    names = [_PICKLES] if len(shards) == 1 else [
        f"pytorch_model-{i:05d}-of-{len(shards):05d}.bin" for i in range(1, len(shards) + 1)]
    index = {"metadata": {"total_size": sum(size for _, size in shards)}, "weight_map": {}}
    index_name = f"{_PICKLES}.index.json"
    with SavedTogether(folder) as files:
        for name, (members, _) in zip(names, shards):
            values = {}  # tied ones once
            for member in members:
                lazy = state_dict[member]
                if id(lazy) not in values:
                    values[id(lazy)] = lazy.contiguous().to(_dtype_of(lazy))
            files.add({member: values[id(state_dict[member])] for member in members}, name)
            index["weight_map"].update(dict.fromkeys(members, name))
        if len(shards) > 1 and any(os.path.lexists(os.path.join(folder, name)) for name in names):
            path = os.path.join(folder, index_name)  # an incomplete folder must not mix two checkpoints
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                raise _C.IoError(f"cannot remove '{path}' of an earlier checkpoint: {error}") from error
        files.publish()
    if len(shards) > 1:
        _C.write_file_atomically(os.path.join(folder, index_name), json.dumps(index, indent=2) + "\n")
    _C.remove_other_weights(folder, {*names, index_name} if len(shards) > 1 else {*names})


def _shards(state_dict, most):
    """[(names, bytes)] of files: tensors in order, up to ``most`` bytes; a tensor's other names follow its first."""
    groups = {}
    for name, lazy in state_dict.items():
        groups.setdefault(id(lazy), []).append(name)
    shards = [([], 0)]
    for names in groups.values():
        lazy = state_dict[names[0]]
        size = lazy.shape.numel() * _dtype_of(lazy).itemsize
        members, held = shards[-1]
        if members and held + size > most:
            shards.append((names, size))
        else:
            shards[-1] = (members + names, held + size)
    return shards


if __name__ == "__main__":
    sys.exit(main())
