"""Real processes, brokers and endpoints that tests start."""
