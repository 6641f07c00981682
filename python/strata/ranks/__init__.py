"""Connects the ranks, chooses their transports, and lets them agree on an outcome."""
