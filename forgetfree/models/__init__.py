"""Models: a pre-trained backbone with a readout per task."""
