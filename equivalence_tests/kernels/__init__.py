"""``sidebyside kernels``: which ways of computing attention are right on this machine, forward and backward."""
