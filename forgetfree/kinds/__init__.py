"""Kinds of tasks, one file for each: how their rows are read, sampled, encoded, answered and scored."""
