"""Runs on a log in memory that tests share: recorded, conducted, of a league, and of a shared model group."""
