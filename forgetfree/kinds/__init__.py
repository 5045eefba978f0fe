"""Kinds of tasks: one file a kind. Each says how its rows are read, drawn, encoded, answered and scored."""
