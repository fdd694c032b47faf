"""The small real task: sentence pairs, training, translating, plots, and its command line."""
