"""Months in minutes: a run whose clocks leap, and what it takes of node and head meanwhile."""
