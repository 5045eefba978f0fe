"""One model and its parameters: regions, grafts, masks (paper, section 2). It imports only torch."""
