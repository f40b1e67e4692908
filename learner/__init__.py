"""Batches in, weight versions out: collate, losses, step, checkpoint, worker."""
