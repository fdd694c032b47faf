"""Benchmarks: scratch, builtin and anybody's own attention, compared first and then timed side by side."""
