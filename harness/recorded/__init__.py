"""Converts externally recorded rollouts and their preference pairs to training data of a run."""
