"""Cluster files: text to spec, and everything that can be wrong on the way. The way in is `clusterctl.config.load`."""
