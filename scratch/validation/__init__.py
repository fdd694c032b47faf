"""The doors: every check of an argument and every error text, once, for both packages.

A value or shape that does not fit is a ValueError, a dtype that does not fit a TypeError. Both are also a RuntimeError
and an AssertionError, the types that torch.nn raises, so that existing ``except`` clauses keep working.
"""

from scratch.validation.attention import *
from scratch.validation.basics import *
from scratch.validation.flex import *
from scratch.validation.grouped import *
from scratch.validation.layers import *
from scratch.validation.masks import *
from scratch.validation.norms import *
from scratch.validation.positional import *
from scratch.validation.recording import *
from scratch.validation.rotary import *
from scratch.validation.score_functions import *
from scratch.validation.sdpa import *
from scratch.validation.task import *
from scratch.validation.tokens import *
from scratch.validation.triton_attention import *
from scratch.validation.varlen import *
