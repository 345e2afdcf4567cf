"""Synthetic tasks and text corpora."""
