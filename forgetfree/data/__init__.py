"""Data: from files, the hub or embedded rows to encoded mini-batches."""
