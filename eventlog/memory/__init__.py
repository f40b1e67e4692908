"""The log in memory, for tests and pure runs."""
