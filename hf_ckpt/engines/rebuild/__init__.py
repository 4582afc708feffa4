"""`selective` by rebuilding: drop tensors that autograd saves, and rebuild them in backward from the tensors kept."""
