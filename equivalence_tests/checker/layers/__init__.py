"""Layers, stacks and whole models: how attentions and parts are wired, and which masks reach them."""
