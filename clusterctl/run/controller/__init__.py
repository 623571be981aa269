"""The process that runs one run: a loop over what arrives, and a part for each thing that it sees to."""
