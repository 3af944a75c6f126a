"""The training recipe, installed as `sparse_cache.recipe`."""
