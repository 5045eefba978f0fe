"""One model and its parameters: regions, grafts, masks. It imports torch alone."""
