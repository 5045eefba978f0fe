"""Tiny models that write texts, made once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import TaskDefinition


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """A model by its family, with one task: ``loaded("Llama")``."""
    import families

    from forgetfree.models.loading import load_model

    made: dict[str, LoadedModel] = {}

    def load(family: str) -> LoadedModel:
        if family not in made:
            made[family] = load_model(str(families.write(family, tmp_path_factory.mktemp(family))), "generate")
            made[family].model.add_task(made[family].head(TaskDefinition("own", "generation", ())))
        return made[family]

    return load
