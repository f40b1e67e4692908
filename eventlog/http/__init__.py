"""Other servers, asked by HTTP."""
