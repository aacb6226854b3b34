"""Models of sounds."""

from typing import Any

from families.batches import WORDS, numbers, spectrograms, spoken_waves, waves
from families.encoder_decoders import BOTH_HALVES
from families.family import Batch, hf, integers
from families.vision import ENCODER

KIND = "audio"

WAVES: dict[str, Any] = {
    **ENCODER,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
}
SPOKEN: dict[str, Any] = {**WAVES, "vocab_size": WORDS, "pad_token_id": 0}


def _long_spectrograms(seed: int) -> Batch:
    return {"input_values": numbers(seed, 32, 16), "labels": integers(seed, 0, 2)}


AUDIO = {
    "whisper": hf(
        KIND,
        "WhisperForConditionalGeneration",
        spectrograms,
        **{key: value for key, value in BOTH_HALVES.items() if key != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    "wav2vec2": hf(KIND, "Wav2Vec2ForSequenceClassification", waves, **WAVES),
    "wav2vec2-ctc": hf(KIND, "Wav2Vec2ForCTC", spoken_waves, **SPOKEN),
    "hubert": hf(KIND, "HubertForSequenceClassification", waves, **WAVES),
    "wavlm": hf(KIND, "WavLMForSequenceClassification", waves, **WAVES),
    "ast": hf(
        KIND,
        "ASTForAudioClassification",
        _long_spectrograms,
        **ENCODER,
        patch_size=4,
        max_length=32,
        num_mel_bins=16,
        frequency_stride=4,
        time_stride=4,
    ),
}
