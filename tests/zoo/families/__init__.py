"""Tiny models of many families, built from their configurations without a download.

Those of ``transformers`` and ``peft`` need the extra ``huggingface``.
"""

from families.audio import AUDIO
from families.changed import CHANGED
from families.convolutions import CONVOLUTIONS
from families.decoders import DECODERS
from families.encoder_decoders import ENCODER_DECODERS
from families.encoders import ENCODERS
from families.experts import EXPERTS
from families.family import Batch, Family, Models, Phase
from families.multimodal import MULTIMODAL
from families.recurrent import RECURRENT
from families.sequences import SEQUENCES
from families.tables import TABLES
from families.vision import VISION

FAMILIES: dict[str, Family] = {
    **DECODERS,
    **ENCODERS,
    **ENCODER_DECODERS,
    **RECURRENT,
    **EXPERTS,
    **VISION,
    **AUDIO,
    **MULTIMODAL,
    **SEQUENCES,
    **CONVOLUTIONS,
    **TABLES,
    **CHANGED,
}
"""Families by name."""

__all__ = ["FAMILIES", "Batch", "Family", "Models", "Phase"]
