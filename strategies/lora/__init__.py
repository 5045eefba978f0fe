"""LoRA: the file of adapters, what strategies by adapters share, and the two strategies; adapters: models/lora_adapters.py."""
