"""A run's configuration: its YAML file or NAT's, read, checked with full paths in errors, turned into settings."""
