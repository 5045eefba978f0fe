"""The paper's experiments, one a file; run by ``forgetfree experiment NAME``."""
