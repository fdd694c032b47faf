"""``sidebyside compare``: components, training, timing."""
