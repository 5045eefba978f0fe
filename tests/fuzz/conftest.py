"""The samples that every test here damages, made once a session, of each worker its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.samples import Samples, make_samples


@pytest.fixture(scope="session")
def samples(data_directory: Path, model_directory, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("fuzz"), data_directory, model_directory("bert"))
