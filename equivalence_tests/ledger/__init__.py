"""The ledger: what the checker says about everything that its tests show it, kept so that a change of it is seen."""
