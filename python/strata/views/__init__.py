"""Reports of start-up and steps for people: accounts, progress and tables."""
