"""One suite for each protocol that has several implementations: what its docstrings promise, on every one of them."""
