"""Reports during training that the configuration switches on: metrics for monitors, lines of progress and of times, a
profile of operations, and the transfers between ranks."""
