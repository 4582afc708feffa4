"""Tests on a simulated accelerator."""
