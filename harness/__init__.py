"""What a user touches: configuration, registry, trainer, supervisor, command line."""
