"""Files of a DeepSpeed checkpoint, by the functions that frameworks look for them with."""

import glob
import os


def get_model_state_file(checkpoint_dir, zero_stage):
    """str: the file of the model's states of rank 0.

    Args:
        checkpoint_dir: the folder of one tag.
        zero_stage: at which it was saved.

    Raises:
        FileNotFoundError: there is no such folder or file.
    """
    names = ("mp_rank_00_model_states.pt",) if zero_stage <= 2 else ("zero_pp_rank_0_mp_rank_00_model_states.pt",)
    return _existing(checkpoint_dir, names[0])[0]


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
            f"'{folder}' has no file {pattern} of DeepSpeed. A checkpoint of Strata is made one file of fp32 weights by "
            "zero_to_fp32.py beside it, and a Hugging Face folder by `strata consolidate`"
        )
    return found


def _natural(path):
    return [int(part) if part.isdigit() else part for part in _split_numbers(os.path.basename(path))]


def _split_numbers(text):
    import re

    return re.split(r"(\d+)", text)
