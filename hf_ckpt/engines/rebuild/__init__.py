"""`selective` by rebuilding: tensors that autograd saves are dropped, and rebuilt in backward from those that stay."""
