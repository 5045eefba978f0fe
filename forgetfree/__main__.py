"""``python -m forgetfree``."""

from forgetfree.cli import main

if __name__ == "__main__":  # workers read this file, too
    raise SystemExit(main())
