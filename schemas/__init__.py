"""Contracts: events, data models, configuration and errors. Imports only the standard library and pydantic."""
