"""Looking into a model: its memory slot by slot, and the paper's theory as checks."""
