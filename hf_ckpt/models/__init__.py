"""Knowledge about models: their families, where their blocks are, and how to make small random ones."""
