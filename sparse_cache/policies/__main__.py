"""`python -m sparse_cache.policies` prints the table of policies."""

from ._catalogue import catalogue

if __name__ == "__main__":
    print(catalogue(), end="")
