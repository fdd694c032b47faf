"""Layers, stacks and whole models: how attentions and parts are put together, and which masks reach them."""
