"""Looking into a model: its memory slot by slot, and statistics over a text."""
