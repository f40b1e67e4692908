"""The command line, a module for each family of commands."""
