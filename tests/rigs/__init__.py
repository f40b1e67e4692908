"""Shared code of tests: services in one process, recorded runs, brokers and endpoints that fail."""
