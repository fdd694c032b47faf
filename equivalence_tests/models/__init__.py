"""``sidebyside models``: an attention function inside the models of a library, against their own attention."""
