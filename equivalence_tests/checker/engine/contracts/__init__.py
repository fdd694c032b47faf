"""The stages of an attention, each held against what it should be, given the stage before it."""
