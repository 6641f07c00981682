"""What a run tells while it trains, where the configuration asks for it: metrics for monitors, lines of progress and of
times, a profile of operations, and what travelled between ranks."""
