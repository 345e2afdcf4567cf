"""Blocks and language models around any mixer."""
