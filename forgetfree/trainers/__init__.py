"""Grafting inside anybody's trainer: what a task may change is decided here, how it is trained is the trainer's matter."""
