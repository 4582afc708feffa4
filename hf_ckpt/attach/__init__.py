"""Enable plans on models, and disable them.

This is the only package that changes a model or the process. It makes no decisions: `training.install.Decider` is the
interface for whatever decides which plan a model gets.
"""
