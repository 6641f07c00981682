"""How start-up and steps went, as people see it: accounts, progress and tables."""
