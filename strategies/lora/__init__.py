"""LoRA: adapters in a model, their file, what strategies by adapters share, and the two strategies."""

from forgetfree.strategies.lora.lora import LoRA as LoRA
