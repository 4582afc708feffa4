"""Records: what the user asked for (`Spec`), what was decided (`Plan`), and the actions.

Nothing in this package imports torch.
"""
