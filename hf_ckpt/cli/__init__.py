"""The command line `hf-ckpt`: one file for each verb, with its options, its table and its picture beside it."""
