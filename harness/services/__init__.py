"""Long-running services: each in its own process that dies with its parent, with a heartbeat, supervised and
restarted."""
