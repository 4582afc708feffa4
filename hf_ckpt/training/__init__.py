"""Tools for a training run: the callback that measures it, the guard against running out of memory, and `verify`."""
