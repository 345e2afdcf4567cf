"""Text corpora: sources, tokenizers, shards, batches."""
