"""What one command asks for: its units of work and its directory."""
