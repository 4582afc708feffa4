"""Measurements: clocks, peaks of memory, counts of live tensors. No other room reads clocks or allocators."""
