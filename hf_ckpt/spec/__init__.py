"""The records that hf_ckpt passes around: what was asked (`Spec`), what was decided (`Plan`), and the actions.

Nothing in this room imports torch.
"""
