"""Looking inside torch.nn's attention: the functions of scratch, which read its modules as they are."""

from scratch.recording import STAGES, AttentionMaps, record_attention, trace_attention

__all__ = ["STAGES", "AttentionMaps", "record_attention", "trace_attention"]
