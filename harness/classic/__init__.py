"""The classic way: a run conducted epoch by epoch by a trainer, a builder and an adapter, as NAT's harness does."""
