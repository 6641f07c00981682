"""Loads models from checkpoints and saves them: names, ranges of files, and the ranges that each rank reads."""
