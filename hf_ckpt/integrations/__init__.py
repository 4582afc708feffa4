"""Plug-ins for programs that train models, which they load by name."""
