"""The engine: watch a run, follow every number by its identity, hold each stage against what it should be, prove it.

``watching`` records, ``identities`` numbers, ``contracts`` judge the stages;
``names`` and ``judgement`` hold what these find. ``intervening`` puts the right values in, ``naming`` says what it is.
"""
