"""Training of one model by several processes, which torchrun starts: each has a shard of it and some of the rows."""
