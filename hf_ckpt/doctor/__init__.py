"""`hf-ckpt doctor`: what will go wrong with activation checkpointing, read from config files and installed versions.

`facts.py` reads the files into `Facts`; `rules.py` has a row for each kind of mistake. Nothing here imports torch, and
nothing that hf_ckpt does depends on the versions that are reported.

Some mistakes cannot be seen in a config, and doctor does not claim to find them: modules in eval mode while gradients
are on (adapters that were never set to train), generation in train mode, code that disables and enables checkpointing
by itself, operations in place, hidden states that are used outside the model, remote code in the old format, what is
given on the command line only, and whether a script installs hf_ckpt. `MemoryTimeCallback` and `hf-ckpt check` see some
of this.
"""
