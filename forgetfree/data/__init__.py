"""From files, hub or embedded rows to encoded mini-batches."""
