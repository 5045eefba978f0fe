"""Task and stream definitions, the embedded data, and speed measurements."""

if __name__ != "forgetfree.benchmarks":
    raise ImportError("Import this package as forgetfree.benchmarks; it is not a top-level package.")
