"""Runs that go wrong in every way that we know, each by a rank drawn at random, and what `clusterctl why` says of them."""
