"""Find, import, build and call somebody's code, and leave everything else as it was."""
