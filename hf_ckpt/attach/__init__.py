"""Putting plans on models and taking them off again.

This is the only room that changes a model or the process. It makes no decisions: which plan a model gets comes from
outside, through `attach.record.Decider`.
"""
