"""Grafting in other trainers: this package decides which weights a task may change, the trainer decides how to train them."""
