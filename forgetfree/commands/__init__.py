"""The commands, one a file: ``add`` says its arguments, ``command`` does it and returns the exit code."""
