"""Models that people run: the weights of a family of ``transformers``, loaded by name into ours and back."""

from equivalence_tests.families.decoders import GEMMA2, GPT_OSS_ATTENTION, LLAMA, MISTRAL, QWEN3
from equivalence_tests.families.earlier import BERT_ENCODER, GPT2
from equivalence_tests.families.family import DoesNotFitError, Family, Rule, from_theirs, into_theirs
from equivalence_tests.families.widening import Widened

__all__ = [
    "BERT_ENCODER",
    "FAMILIES",
    "GEMMA2",
    "GPT2",
    "GPT_OSS_ATTENTION",
    "LLAMA",
    "MISTRAL",
    "QWEN3",
    "DoesNotFitError",
    "Family",
    "Rule",
    "Widened",
    "from_theirs",
    "into_theirs",
]

FAMILIES = (LLAMA, MISTRAL, QWEN3, GEMMA2, GPT_OSS_ATTENTION, GPT2, BERT_ENCODER)
