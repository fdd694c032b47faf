"""The engine: watch a run, follow every number by its identity, hold each stage against what it should be, prove it.

``watching`` records, ``identities`` numbers, ``anchors`` finds the attentions, ``contracts`` judges their stages,
``intervening`` puts the right values in, ``naming`` says what it is. ``calls`` is the door to one recorded call,
``subjects`` to a class that is built and called.
"""

from equivalence_tests.checker.engine.calls import diagnose_call
from equivalence_tests.checker.engine.subjects import diagnose_subject

__all__ = ["diagnose_call", "diagnose_subject"]
