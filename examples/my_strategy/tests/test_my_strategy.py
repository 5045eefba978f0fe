"""The strategy and the stream satisfy the contracts of forgetfree."""

from __future__ import annotations

from my_strategy import MyStrategy

from forgetfree.testing import check_strategy, check_stream


def test_my_strategy() -> None:
    check_strategy(MyStrategy, pull=0.1)


def test_my_stream() -> None:
    check_stream("my-stream", data="demo")
