"""The command line `hf-ckpt`: one file for each command."""
