"""The head and its loss in chunks of tokens, so that the logits of the whole batch never exist."""
