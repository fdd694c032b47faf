"""The parts of a Transformer beside its attention: norms, feed-forwards, positional encodings, mask builders."""
