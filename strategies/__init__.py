"""The strategies. Their names on the command line are in `forgetfree.registry`."""

if __name__ != "forgetfree.strategies":
    raise ImportError("Import this package as forgetfree.strategies; it is not a top-level package.")
