"""Predicts the parts of a training step before it is run.

`skeleton` reduces a model to one block of every kind, without weights; `trace` traces every kind of block on fake
tensors under every action, for `hf_ckpt.costs` to compute the memory of a step at the real depth.
"""
