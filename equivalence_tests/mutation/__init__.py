"""Break ``scratch`` in every small way, one at a time, and see that a test fails.

``python -m equivalence_tests.mutation`` breaks all files; ``... masks.py`` some. See ``breaking`` for what is broken,
``running`` for which tests look at it, and ``equivalent.toml`` for what no test can see, with the reasons.
"""
