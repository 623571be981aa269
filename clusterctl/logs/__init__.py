"""Worker output as lines: read from the replicas, sanitized, merged by time, folded and followed."""
