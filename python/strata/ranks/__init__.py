"""How ranks find each other, what carries bytes between them, and how they agree on an outcome."""
