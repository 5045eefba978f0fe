"""Names and what they stand for, ours and those of installed packages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forgetfree import registry
from forgetfree.errors import ForgetfreeError, UnknownNameError


@dataclass
class Distribution:
    name: str


@dataclass
class Point:
    """An entry point as `importlib.metadata` gives it."""

    name: str
    value: str
    dist: Distribution | None = None


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Point]]:
    """The entry points of installed packages, by group."""
    points: dict[str, list[Point]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))
    return points


@pytest.mark.parametrize("name", sorted(registry.STRATEGIES))
def test_every_strategy_of_ours_loads(name: str) -> None:
    loaded = registry.strategy(name)
    assert f"{loaded.__module__}:{loaded.__name__}" == registry.STRATEGIES[name].target


def test_every_strategy_file_is_registered() -> None:
    files = {path.stem for path in (Path(registry.__file__).parent / "strategies").glob("[a-z]*.py")}
    assert {entry.target.split(":")[0].split(".")[-1] for entry in registry.STRATEGIES.values()} == files


@pytest.mark.parametrize("name", sorted(registry.SOURCES))
def test_every_source_loads(name: str) -> None:
    assert callable(registry.SOURCES[name].load())


def test_every_name_has_a_summary() -> None:
    tables: list[dict[str, Any]] = [registry.STRATEGIES, registry.MODELS, registry.SOURCES]
    assert all(entry.summary for table in tables for entry in table.values())


def test_the_default_strategies_are_registered_and_the_reference_comes_first() -> None:
    assert set(registry.DEFAULT_STRATEGIES) <= set(registry.STRATEGIES)
    assert registry.DEFAULT_STRATEGIES[0] == "fine-tune"


def test_an_unknown_strategy_is_told_its_neighbour() -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.strategy("grafting-continuous")
    assert str(caught.value).startswith(
        "Unknown strategy 'grafting-continuous'. Did you mean 'grafting-continual'? Known: "
    )


def test_an_installed_package_adds_a_strategy(plugins: dict[str, list[Point]]) -> None:
    plugins["forgetfree.strategies"] = [Point("own", "collections:OrderedDict", Distribution("own-package"))]
    assert list(registry.strategies())[-1] == "own"
    assert registry.strategies()["own"].summary == "from own-package"
    assert registry.strategy("own").__name__ == "OrderedDict"


def test_an_installed_package_adds_a_stream(plugins: dict[str, list[Point]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("string.own_stream", ["trec", "subj"], raising=False)
    plugins["forgetfree.streams"] = [Point("own", "string:own_stream")]
    assert registry.streams()["own"] == ("trec", "subj")


def test_an_installed_package_cannot_take_a_name_of_ours(plugins: dict[str, list[Point]]) -> None:
    plugins["forgetfree.strategies"] = [Point("fine-tune", "os:system")]
    plugins["forgetfree.streams"] = [Point("qnli-agnews-sst2", "os:environ")]
    assert registry.strategies()["fine-tune"] == registry.STRATEGIES["fine-tune"]
    assert registry.streams()["qnli-agnews-sst2"] == ("qnli", "ag_news", "sst2")


@pytest.mark.parametrize("target", ["no_such_package:Own", "string:NoSuchName"])
def test_a_broken_package_is_named_with_the_reason(plugins: dict[str, list[Point]], target: str) -> None:
    plugins["forgetfree.strategies"] = [Point("own", target)]
    assert "own" in registry.strategies()  # listing loads nothing
    with pytest.raises(ForgetfreeError) as caught:
        registry.strategy("own")
    assert str(caught.value).startswith(f"{target!r} cannot be loaded: ")
    assert str(caught.value).endswith("Mend or uninstall the package that registers it.")
