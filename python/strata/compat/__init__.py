"""Strata under the names of other libraries, for programs that stay unchanged."""
