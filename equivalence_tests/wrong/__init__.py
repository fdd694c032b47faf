"""Wrong versions of right attentions: whether the checker calls one of them EQUAL. ``make wrong`` runs it."""
