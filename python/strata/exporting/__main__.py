"""``python -m strata.exporting``: converts training checkpoints of Strata to those of other libraries."""

import argparse
import sys

from ..importing.__main__ import run
from .deepspeed import export_deepspeed

_EPILOG = "Exit codes: 0 done, 1 the checkpoint is damaged or cannot be exported, 2 a wrong command line."


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m strata.exporting", epilog=_EPILOG,
        description="Turns a training checkpoint of Strata into one that another library goes on from.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{deepspeed}")
    deepspeed = commands.add_parser(
        "deepspeed", help="as DeepSpeed's ZeRO writes its own", epilog=_EPILOG,
        description="Writes weights, the optimizer's states, scheduler, loss scale, steps and the script's values as "
                    "DeepSpeed writes them. DeepSpeed then loads them with the same param groups, the same number of "
                    "ranks and the same stage.")
    deepspeed.add_argument("checkpoint", help="folder of Strata's checkpoints, or of one tag")
    deepspeed.add_argument("out", help="folder for DeepSpeed's checkpoint; made if need be")
    deepspeed.add_argument("--tag", help="which checkpoint; default: the one that 'latest' names")
    deepspeed.add_argument("--world", type=int, help="ranks that DeepSpeed will train on; default: as many as saved")
    deepspeed.add_argument("--stage", type=int, help="1, 2 or 3, of DeepSpeed's run; default: the checkpoint's")
    deepspeed.add_argument("--sub-group-size", type=int, default=10**9, metavar="ELEMENTS",
                           help="zero_optimization.sub_group_size of DeepSpeed's run; default: 1e9, as DeepSpeed's")
    deepspeed.add_argument("--json", action="store_true", help="the report as JSON")
    deepspeed.set_defaults(convert=lambda given: export_deepspeed(given.checkpoint, given.out, given.tag, given.world,
                                                                  given.stage, given.sub_group_size))
    return run(parser, parser.parse_args(arguments), "exported_from")


if __name__ == "__main__":
    sys.exit(main())
