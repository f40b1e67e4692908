"""Dead letters and unused weights of a workspace."""
