"""Named runs: each a function that returns its result, with nothing left to flags."""
