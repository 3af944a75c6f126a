"""Measurements of the cache: speed, memory, quality, and that nothing else changes.

`python -m benchmarks` runs every part; each part also runs alone, for example
`python -m benchmarks.decode --model tiny`. Every part prints a table and writes its figures, with
the machine, the versions and the settings, as JSON into `benchmarks/results/`.
"""
