"""The demo, installed as `sparse_cache.demo`."""
