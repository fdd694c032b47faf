"""Operators that nobody looked at while the checker was changed: they run with --unseen alone."""

from equivalence_tests.wrong.operators import wraps

__all__ = ["UNSEEN"]

UNSEEN = (
    wraps("unseen: sorted", "E.sort(-1).values", "E.sort(-2).values", dims=2),
    wraps("unseen: largest alone", "E * (E == E.amax(-1, keepdim=True))", dims=2),
    wraps("unseen: mixed with the token before", "E.lerp(E.roll(1, -2), 0.3)", dims=2),
    wraps("unseen: running mean", "E.cumsum(-2) / torch.arange(1, E.size(-2) + 1)[:, None]", dims=2),
    wraps("unseen: heads averaged", "E.mean(1, keepdim=True).expand_as(E)", dims=4),
    wraps("unseen: power", "E.sign() * E.abs().sqrt()", "E**3"),
    wraps("unseen: two channels turned", "E.index_select(-1, torch.arange(E.size(-1)).roll(2))", dims=2),
    wraps("unseen: temperature learnt", "E * self.added.exp()", added="nn.Parameter(torch.zeros(()))"),
)
