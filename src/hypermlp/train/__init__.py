"""Optimisation of any model from any iterator of batches."""
