"""One task: fine-tune, localize, train, predict."""
