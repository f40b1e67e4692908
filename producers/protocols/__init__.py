"""Interaction protocols between provers and a verifier: rounds, turn order, visibility, verdicts, rewards. Pure."""
