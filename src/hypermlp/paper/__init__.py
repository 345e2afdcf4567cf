"""What the paper prints: its tables, how their operations were counted, and the language models that it trains."""
