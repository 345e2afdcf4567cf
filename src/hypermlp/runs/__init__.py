"""Training runs of language models: named configurations, what they cost, the run itself, and what it writes."""
