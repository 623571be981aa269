"""The output of a run as lines: read from the replicas, cleaned, merged by time, folded, followed."""
