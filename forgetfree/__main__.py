"""``python -m forgetfree``."""

from forgetfree.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
