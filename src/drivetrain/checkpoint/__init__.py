"""One checkpoint format for all strategies: shards, manifest, save, load, export.

Everything here works on plain data (shards, mappings, tensors) and knows neither the facade nor a
strategy. The format is described in ``docs/checkpoint-format.md``. ``description`` and ``manifest``
import no torch.
"""
