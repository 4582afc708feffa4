"""Makes plans: from a spec and the blocks of a model, or from traced costs and a budget in bytes.

`install` puts a plan on a model, `policies` makes those of fixed policies, `live` those of `budget` and `auto` in
training, and `forecast` answers `hf_ckpt.predict`. `budgets` and `solver` choose the fastest actions that fit.
"""
