"""``python -m strata.importing``: converts checkpoints of other libraries to Strata's."""

import argparse
import json
import logging
import os
import sys

from .. import _C
from ..views import logger
from .dcp import import_dcp
from .deepspeed import import_deepspeed

_DESCRIPTION = "Turns a checkpoint of another library into one that strata's engine.load_checkpoint goes on from."
_EPILOG = "Exit codes: 0 done, 1 the checkpoint is damaged or cannot be imported, 2 a wrong command line."


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m strata.importing", description=_DESCRIPTION, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{deepspeed,dcp}")
    deepspeed = commands.add_parser(
        "deepspeed", help="a checkpoint of DeepSpeed's ZeRO", epilog=_EPILOG,
        description="Imports a checkpoint of DeepSpeed, stages 1 to 3 or a universal one: weights, the optimizer's "
                    "states, scheduler, loss scale, steps, the script's values.")
    deepspeed.add_argument("checkpoint", help="DeepSpeed's folder: that of all tags, or of one")
    deepspeed.add_argument("--tag", help="which checkpoint; default: the one that 'latest' names")
    deepspeed.set_defaults(convert=lambda given: import_deepspeed(given.checkpoint, given.out, given.tag))
    dcp = commands.add_parser(
        "dcp", help="a folder of torch.distributed.checkpoint", description="Imports what FSDP2's users save: "
        'dcp.save({"model": ..., "optimizer": ...}) of get_state_dict, or a model\'s state dict alone.', epilog=_EPILOG)
    dcp.add_argument("checkpoint", metavar="folder", help="where dcp.save wrote: it has a file '.metadata'")
    dcp.add_argument("--tag", help="name of the new checkpoint; default: the folder's")
    dcp.add_argument("--buffer", action="append", default=[], metavar="NAME", dest="buffers",
                     help="a floating tensor of the model that is a buffer, and no frozen parameter; may be given "
                          "again")
    dcp.set_defaults(convert=lambda given: import_dcp(given.checkpoint, given.out, given.tag, given.buffers))
    for command in (deepspeed, dcp):
        command.add_argument("out", help="folder for Strata's checkpoint; made if need be")
        command.add_argument("--json", action="store_true", help="the report as JSON")
    return run(parser, parser.parse_args(arguments), "imported_from")


def run(parser, given, source):
    """The exit code of a conversion. Prints the path of the new checkpoint, or its report as JSON. ``given``, of
    ``parser``, has ``checkpoint``, ``json`` and ``convert``: given -> path; ``source``: the name of
    ``given.checkpoint`` in the report."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    try:
        path = given.convert(given)
    except (_C.FormatError, _C.IoError, _C.UsageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _C.UsageError) else 1
    report = {"path": path, "tag": os.path.basename(path), source: given.checkpoint}
    print(json.dumps(report, indent=2) if given.json else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
