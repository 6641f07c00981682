"""Long rows: ranks that share their tokens, and what spares memory on one rank."""
