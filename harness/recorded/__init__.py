"""Rollouts that others have recorded, and the preference pairs in them, as what a run can train on."""
