"""The benchmarks are not part of the installed package: make them importable from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
