"""One model and its parameters: regions, grafts, masks. It imports torch, and pydantic for the headers of files."""
