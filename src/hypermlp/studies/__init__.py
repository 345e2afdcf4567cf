"""Studies of many small models: an engine that survives stops, two kinds of study, and the named ones (demo, Table 1)."""
