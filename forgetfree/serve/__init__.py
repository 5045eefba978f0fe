"""What was learned, in use."""
