"""Sequence parallelism: ranks that share rows, each with a piece of every row's tokens."""
