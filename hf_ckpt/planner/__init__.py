"""Makes plans, either from a spec and the blocks of a model, or from costs and a budget in bytes.

`policies` makes the plans of fixed policies. `choose` finds the fastest actions within a number of bytes, and `Planner`
makes plans of them.
"""
