"""One task: fine-tune, localise, train, predict."""
