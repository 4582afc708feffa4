"""`hf-ckpt doctor`: find silent faults in the config files of a training, and read them for `hf-ckpt plan --config`."""
