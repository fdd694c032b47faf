"""For the person who learns the built-in API: traps and explanations."""
