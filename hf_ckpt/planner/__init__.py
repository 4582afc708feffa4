"""Makes plans, either from a spec and the blocks of a model, or from costs and a budget in bytes.

`policies` makes the plans of fixed policies. `budgets` and `choose` choose the fastest actions that fit, and `segments`
has the costs of blocks in segments.
"""
