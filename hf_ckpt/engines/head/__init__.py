"""The head and its loss in chunks of tokens: the logits of the whole batch never exist."""
