"""Learned tasks in use."""
