"""Options are typed and bounded, and all wrong ones are reported together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from forgetfree import registry
from forgetfree.errors import OptionError, UnknownNameError
from forgetfree.options import Options, build, describe, option
from forgetfree.strategies.bitfit import BitFit


class Own(Options):
    rate: float = option(0.1, "how fast", above=0, at_most=1)
    steps: int | None = option(None, "how long", at_least=1)
    nesterov: bool = option(False, "look ahead")
    optimizer: Literal["sgd", "adamw"] = option("sgd", "which")
    note: str = option("", "anything")
    places: str | tuple[str, ...] = option("", "where")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0}, "rate must be above 0, got 0."),
        ({"rate": 1.5}, "rate must be at most 1, got 1.5."),
        ({"rate": float("nan")}, "rate must be finite, got nan."),
        ({"rate": True}, "rate must be a number, got True."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"steps": 2.0}, "steps must be a whole number or none, got 2.0."),
        ({"nesterov": 1}, "nesterov must be true or false, got 1."),
        ({"optimizer": "adam"}, "optimizer must be sgd or adamw, got 'adam'."),
        ({"note": 3}, "note must be a text, got 3."),
        ({"places": (1, 2)}, "places must be a text or a list of texts, got (1, 2)."),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Own(**values)
    assert str(caught.value) == message


def test_all_faults_are_told_together() -> None:
    with pytest.raises(OptionError) as caught:
        Own(rate=2, steps=-1, optimizer="adam")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "rate must be at most 1, got 2; steps must be at least 1, got -1; optimizer must be sgd or adamw, got 'adam'."
    )


def test_texts_are_read_as_the_options_type() -> None:
    assert isinstance(Own(rate=1).rate, float)  # a whole number is accepted as any number
    values = {"rate": "5e-3", "steps": "12", "nesterov": "yes", "optimizer": "adamw", "note": "12"}
    assert build(Own, values, "own") == Own(rate=0.005, steps=12, nesterov=True, optimizer="adamw", note="12")
    for text, value in (("none", None), ("NULL", None)):
        assert build(Own, {"steps": text}, "own").steps is value
    for text, value in (("on", True), ("TRUE", True), ("off", False), ("No", False)):
        assert build(Own, {"nesterov": text}, "own").nesterov is value


def test_wrong_texts_and_wrong_values_are_told_together_with_their_owner() -> None:
    with pytest.raises(OptionError) as caught:
        build(Own, {"steps": "1e3", "rate": "-1", "nesterov": "maybe"}, "fine-tune")
    assert str(caught.value) == (
        "Options of fine-tune: rate must be above 0, got -1.0; steps must be a whole number or none, got '1e3'; "
        "nesterov must be true or false, got 'maybe'."
    )


def test_an_unknown_option_is_told_its_neighbour() -> None:
    with pytest.raises(
        UnknownNameError, match=r"Unknown option of own 'stps'\. Did you mean 'steps'\? Known: nesterov, "
    ):
        build(Own, {"stps": "1"}, "own")


class Several(Options):
    counts: tuple[Annotated[int, Field(ge=1)], ...] = option((), "how many")


def test_several_values_are_read_and_checked_one_by_one() -> None:
    assert build(Several, {"counts": ["1", "20"]}, "own").counts == (1, 20)
    with pytest.raises(OptionError) as caught:
        build(Several, {"counts": ["1", "0", "x"]}, "own")
    assert str(caught.value) == (
        "Options of own: counts must be at least 1, got 0; counts must be a whole number, got 'x'."
    )


def test_every_option_is_described() -> None:
    described = {d["name"]: (d["type"], d["default"], d["help"]) for d in describe(Own)}
    assert list(described) == ["rate", "steps", "nesterov", "optimizer", "note", "places"]
    assert described["rate"] == ("a number", "0.1", "how fast")
    assert described["steps"] == ("a whole number or none", "none", "how long")
    assert described["nesterov"] == ("true or false", "false", "look ahead")
    assert (described["optimizer"][0], described["note"][0]) == ("sgd or adamw", "a text")


class Paired(Options):
    low: int = option(0, "the least")
    high: int = option(1, "the most")

    @model_validator(mode="after")
    def _ordered(self) -> Paired:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self


def test_a_validator_of_an_author_is_told_in_its_words() -> None:
    with pytest.raises(OptionError, match=r"^Options of mine: low must not be above high\.$"):
        build(Paired, {"low": 3}, "mine")


def test_an_authors_mistakes_are_told() -> None:
    class NoDefault(Options):
        rate: float

    with pytest.raises(OptionError, match=r"rate has no default: declare it as rate: float = option\(default, help\)"):
        build(NoDefault, {}, "mine")
    with pytest.raises(TypeError, match=r"Own is a pydantic model, which takes no @dataclass\. Remove the decorator"):
        dataclass(Own)


def test_a_strategy_whose_default_is_refused_cannot_be_used() -> None:
    class WrongDefault(BitFit.Options):  # type: ignore[misc,name-defined]
        strength: int = option("much", "how much")

    class Mine(BitFit):
        Options = WrongDefault

    with pytest.raises(OptionError, match="Options of Mine: strength must be a whole number, got 'much'"):
        registry.strategy_class(Mine)
