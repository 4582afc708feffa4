"""Code that tests share: steps, toys, processes. Test modules do not import each other."""
