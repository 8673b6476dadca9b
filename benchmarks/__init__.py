"""Benchmarks: harness, named shapes, one file a question. `python -m benchmarks` runs the step."""
