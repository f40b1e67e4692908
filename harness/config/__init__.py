"""A run's configuration: reads a YAML file or NAT's configuration, validates it and derives settings."""
