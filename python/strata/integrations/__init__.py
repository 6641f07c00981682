"""Strata within other libraries, under its own name."""
