"""The checker's outside judges: every attention of transformers, timm and diffusers, as published and broken."""
