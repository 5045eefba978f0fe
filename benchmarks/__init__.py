"""Task and stream definitions, the embedded data, and speed measurements."""

if __name__ != "benchmarks":
    raise ImportError("Import this package as benchmarks; it is not a top-level package.")
