"""Implementation of the replay command."""
