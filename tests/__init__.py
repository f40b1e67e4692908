"""Tests, in folders as the sources are. What several folders share is in `tests.rigs`."""
