"""Grafts and ledgers on the Hugging Face hub: one safetensors file and a card per repository, by `huggingface_hub`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download

from forgetfree.errors import HubError, UsageError, first_line
from forgetfree.files import StrPath

_CARD = """---
{{ card_data }}
---

# A {{ noun }} of [forgetfree](https://pypi.org/project/forgetfree/)

Some parameters of a pre-trained model with the values that {{ "a task" if noun == "graft" else "tasks" }} gave them
([Panigrahi et al., 2023]({{ paper_url }})). All others are the base model's own, and not in this file.

{% for fact in facts %}
    {{ fact }}
{% endfor %}

```python
{{ use }}
```
"""


class HubFile(
    ModelHubMixin, library_name="forgetfree", paper_url="https://arxiv.org/abs/2302.06600", model_card_template=_CARD
):
    """A file on the hub, with ``push_to_hub``, ``from_pretrained`` and ``save_pretrained``."""

    #: The name of the file and of its content.
    noun: ClassVar[str]
    #: Python code that uses it, for the card.
    use: ClassVar[str]
    #: The content of config.json, with which the hub counts downloads; it is never read.
    _hub_mixin_config: dict[str, Any] = {"library_name": "forgetfree"}  # noqa: RUF012

    def save(self, path: StrPath) -> None:
        """Write the file."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: StrPath) -> Any:
        """Load the file, and check all of it."""
        raise NotImplementedError

    def facts(self) -> Sequence[Mapping[str, Any]]:
        """Return the facts for the card, one object per line."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write file and card into a directory; see `huggingface_hub.ModelHubMixin.save_pretrained`.

        Raises:
            UsageError: the directory has a model or a run, whose config.json would be replaced.
        """
        config = Path(save_directory) / "config.json"
        if config.is_file() and not (config.parent / f"{self.noun}.safetensors").is_file():
            raise UsageError(f"{config} belongs to something else. Give another directory.")
        return super().save_pretrained(save_directory, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory / f"{self.noun}.safetensors")

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
        name = f"{cls.noun}.safetensors"
        if (directory := Path(model_id)).is_dir():
            return cls.load(directory / name)
        known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        try:
            file = hf_hub_download(model_id, name, **{key: options[key] for key in known})
        except Exception as error:  # from any HTTP library that the client uses
            raise HubError(
                f"{model_id} cannot be read from the hub: {first_line(error)}. Check the name and the revision; if it is "
                "private, log in by `hf auth login`, or set HF_TOKEN; else the network, proxy, HF_ENDPOINT and HF_HUB_OFFLINE."
            ) from error
        return cls.load(file)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the card. It shows users' names as indented JSON, which markdown in them cannot break out of."""
        facts = [
            json.dumps(fact, ensure_ascii=False).replace("\u2028", " ").replace("\u2029", " ") for fact in self.facts()
        ]
        return super().generate_model_card(*args, noun=self.noun, use=self.use, facts=facts, **kwargs)
