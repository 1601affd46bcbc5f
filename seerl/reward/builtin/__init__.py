"""Rewards that are named without a file: each a module with `compute_score`."""
