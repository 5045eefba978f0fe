"""The strategies, one a file. Names on the command line stand in `forgetfree.registry`."""

if __name__ != "forgetfree.strategies":
    raise ImportError("Import this package as forgetfree.strategies; it is not a top-level package.")
