"""Reads worker output from the replicas as lines: sanitizes, merges by time, folds and follows them."""
