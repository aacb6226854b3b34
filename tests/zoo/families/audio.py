"""Models of sounds."""

from functools import partial
from typing import Any

from families.batches import WORDS, numbers, spectrograms, spoken_waves, waves
from families.encoder_decoders import BOTH_HALVES
from families.family import Batch, hf, integers
from families.vision import ENCODER

KIND = "audio"

WAVES: dict[str, Any] = {
    **ENCODER, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
}  # fmt: skip
SPOKEN: dict[str, Any] = {**WAVES, "vocab_size": WORDS, "pad_token_id": 0}


def _long_spectrograms(seed: int) -> Batch:
    return {"input_values": numbers(seed, 32, 16), "labels": integers(seed, 0, 2)}


WHISPER = {key: value for key, value in BOTH_HALVES.items() if key != "max_position_embeddings"}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
SPECTROGRAMS: dict[str, Any] = {
    **ENCODER, "patch_size": 4, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4,
    "time_stride": 4,
}  # fmt: skip

_family = partial(hf, KIND)

AUDIO = {
    "whisper": _family("WhisperForConditionalGeneration", spectrograms, **WHISPER),
    "wav2vec2": _family("Wav2Vec2ForSequenceClassification", waves, **WAVES),
    "wav2vec2-ctc": _family("Wav2Vec2ForCTC", spoken_waves, **SPOKEN),
    "hubert": _family("HubertForSequenceClassification", waves, **WAVES),
    "wavlm": _family("WavLMForSequenceClassification", waves, **WAVES),
    "ast": _family("ASTForAudioClassification", _long_spectrograms, **SPECTROGRAMS),
}
