"""Cluster files: from text to a spec, with all problems at once. The entry point is `clusterctl.config.loader`."""
