"""Measurements: clocks, peaks of memory, counts of live tensors. No other package reads clocks or allocators."""
