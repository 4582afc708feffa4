"""Plug-ins for training programs, which load them by name."""
