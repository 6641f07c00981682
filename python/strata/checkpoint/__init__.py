"""How a checkpoint becomes a model and a model a checkpoint: names, ranges of files, and which rank reads what."""
