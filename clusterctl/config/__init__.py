"""Converts cluster files to specs, and reports all problems at once. Entry point: `clusterctl.config.loader`."""
