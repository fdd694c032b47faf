"""Models in the shapes of public code, written anew: whole files, as somebody would hand them over."""
