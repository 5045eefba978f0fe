"""Models: a pre-trained backbone, read out per task."""
