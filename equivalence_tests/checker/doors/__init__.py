"""How people reach the checker: a command, files and folders, notebooks, and what they get back."""
