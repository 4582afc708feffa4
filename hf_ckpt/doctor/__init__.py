"""`hf-ckpt doctor`: find mistakes with activation checkpointing in config files and installed versions.

`facts.py` reads the files into `Facts`; `rules.py` has a row for each kind of mistake. Nothing here imports torch.

Configs do not show: modules in eval mode during training, generation in train mode, code that disables and enables
checkpointing, in-place operations, hidden states that are used outside the model, remote code in the old format,
options of the command line, and whether a script installs hf_ckpt. `MemoryTimeCallback` and `hf-ckpt check` find some
of these.
"""
