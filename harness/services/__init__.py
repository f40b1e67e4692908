"""Long-running services: each in its own process, tied to its parent, with signs of life; supervised and restarted."""
