"""Benchmarks: `python -m benchmarks.NAME [--quick] [--seed N] [--json FILE]`, from the repository's root."""
