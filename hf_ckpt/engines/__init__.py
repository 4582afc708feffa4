"""One file an engine; each makes a function `(fn, *args) -> outputs` that a block calls instead of its forward."""
