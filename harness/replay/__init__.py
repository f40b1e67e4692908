"""Replay of a run from its topics or an export: verified, trained again, or changed (what-if)."""
