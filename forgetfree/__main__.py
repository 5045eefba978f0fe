"""``python -m forgetfree``."""

from forgetfree.cli import main

raise SystemExit(main())
