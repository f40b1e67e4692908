"""Every topic into DuckDB: projection, SQL service, plots."""
