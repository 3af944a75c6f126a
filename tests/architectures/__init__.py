"""Every causal language model type of transformers, built tiny and checked against the cache."""
