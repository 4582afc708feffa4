"""Predicts the bytes and the seconds of a training step before it is run.

A model becomes a skeleton without weights and depth (`skeleton`); every kind of block is traced on fake tensors under
every action (`trace`); from these costs the memory of a step of the real depth is put together (`timeline`).
"""
