"""The built-in algorithms, one file each, by the name that `algorithm.name` says."""
