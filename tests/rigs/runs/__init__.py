"""Runs on a log in memory that tests share: recorded, conducted, of a shared model group, of a league with ratings."""
