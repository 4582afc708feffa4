"""What runs beside a training: the callback that measures it, the guard against running out of memory, and `verify`."""
