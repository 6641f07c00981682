"""Finds files of a DeepSpeed checkpoint, through the functions that frameworks call."""

import glob
import os
import re


def get_model_state_file(checkpoint_dir, zero_stage):
    """str: the file of the model's states of rank 0.

    Args:
        checkpoint_dir: the folder of one tag.
        zero_stage: the stage at which it was saved.

    Raises:
        FileNotFoundError: there is no such folder or file.
    """
    sharded = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return _existing(checkpoint_dir, f"{sharded}mp_rank_00_model_states.pt")[0]


def get_optim_files(checkpoint_dir):
    """[str]: the files of the optimizer's states, of every rank in order.

    Raises:
        FileNotFoundError: there are none.
    """
    return _existing(checkpoint_dir, "*_optim_states.pt")


def _existing(folder, pattern):
    found = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)), key=_natural)
    if not found:
        raise FileNotFoundError(
            f"'{folder}' has no file {pattern} of DeepSpeed. zero_to_fp32.py beside a checkpoint of Strata makes one "
            "file of fp32 weights of it, and `strata consolidate` a Hugging Face folder"
        )
    return found


def _natural(path):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", os.path.basename(path))]
