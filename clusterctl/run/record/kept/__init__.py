"""What is kept of a run to be looked at later, here or elsewhere."""
