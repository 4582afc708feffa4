"""What tests share: steps, toys, processes. No test module imports another."""
