"""Formulas, and lines of right code, of which the mistakes of several stages speak."""

SCALE = "scores = q kᵀ / sqrt(head_dim)"
SOFTMAX = "weights = softmax(scores, dim=-1)"
ROTATED = "scores = rotate(q) rotate(k)ᵀ"
SCALE_LINE = "q @ k.mT / math.sqrt(q.size(-1))"
SOFTMAX_LINE = "scores.softmax(-1)"
WEIGHED = "dropped @ v"
RETURNED = "return self.out_proj(merged)"
