"""The tests that hold scratch, builtin and torch.nn together, one file for each file of scratch."""
