"""The plugin: rollstream's components and evaluators under NeMo Agent Toolkit's own commands."""
