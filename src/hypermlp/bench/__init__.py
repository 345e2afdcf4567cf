"""Measurements: time as ratios within one run, memory in fresh processes, operations counted."""
