"""The harness's three interfaces, rollstream's components for them, and the run that they conduct."""
