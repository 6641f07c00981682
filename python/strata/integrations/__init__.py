"""Strata under other libraries' own names, without standing in for another engine."""
