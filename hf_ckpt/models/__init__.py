"""What hf_ckpt knows of models: their families, where their blocks are, and how to make small random ones."""
