"""The work that one command asks for: its units and its directory."""
