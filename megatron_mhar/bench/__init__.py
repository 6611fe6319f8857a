"""Benchmarks: ``mhar bench``. No speed is told of what has not been found right in the same run."""
