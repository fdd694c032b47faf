"""Attention as people write it, right and wrong: each broken class is named by its defect and proves the checker.

``conventions`` holds right implementations in the forms met in public code; ``defects`` breaks them one stage at a
time; ``parts`` holds LayerNorms, feed-forwards, positional encodings and layers; ``source_defects`` the four real
defects of the source documents. ``cases`` lists them all. ``stages`` holds an attention whose stages the look-alikes of
the tests replace.
"""
