"""Arguments of a training script's command line."""


def add_config_arguments(parser):
    """Adds ``--deepspeed`` (a flag for the script itself) and ``--deepspeed_config`` to an ``argparse`` parser;
    ``strata.initialize(args=...)`` reads the latter. Scripts use these names.

    Returns:
        ``parser``.
    """
    group = parser.add_argument_group("Strata", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine; for the script's own use")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    return parser
