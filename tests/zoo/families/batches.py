"""Batches of ``ROWS`` rows: words, images, sounds; targets are ignored here and there."""

import torch
from torch import Tensor

from families.family import ROWS, Batch, integers, numbers

WORDS, LENGTH = 61, 8
PADDING, FIRST_WORD = 0, 3
"""Words 1 and 2 begin and end a text."""

IMAGE, LARGE_IMAGE = 16, 64
IGNORED = -100


def words(seed: int, length: int = LENGTH) -> Tensor:
    """Return words without special ones, shape (ROWS, length)."""
    return integers(seed, FIRST_WORD, WORDS - 1, length)


def partly_ignored(targets: Tensor) -> Tensor:
    """Return targets of which row i ignores the first i."""
    targets = targets.clone()
    for row in range(len(targets)):
        targets[row, :row] = IGNORED
    return targets


def text(seed: int) -> Batch:
    """Return words to be continued; every row counts another number of targets."""
    found = words(seed)
    return {"input_ids": found, "labels": partly_ignored(found)}


def padded_text(seed: int) -> Batch:
    """Return words to be found again, rows of several lengths."""
    found, mask = words(seed), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row in range(ROWS):
        mask[row, LENGTH - row :] = 0
    found = found.masked_fill(mask == 0, PADDING)
    labels = found.masked_fill(mask == 0, IGNORED)
    return {"input_ids": found, "attention_mask": mask, "labels": labels}


def marked_words(seed: int) -> Batch:
    """Return words with a class for each."""
    found = words(seed)
    return {"input_ids": found, "labels": found % 2}


def classified_text(seed: int) -> Batch:
    """Return words with a class for each row."""
    return {"input_ids": words(seed), "labels": integers(seed, 0, 2)}


def answered_text(seed: int) -> Batch:
    """Return words with the beginning and end of an answer."""
    return {
        "input_ids": words(seed),
        "start_positions": integers(seed, 0, 4),
        "end_positions": integers(seed, 4, LENGTH),
    }


def sentence_pairs(seed: int) -> Batch:
    """Return words of two sentences, words to be found again, and whether one follows the other."""
    found = words(seed)
    kinds = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(ROWS, LENGTH)
    return {
        "input_ids": found,
        "token_type_ids": kinds,
        "labels": partly_ignored(found),
        "next_sentence_label": integers(seed, 0, 2),
    }


def translated_text(seed: int) -> Batch:
    """Return words and other words to be said for them."""
    return {"input_ids": words(seed), "labels": partly_ignored(words(seed + 500, 6))}


def images(seed: int) -> Batch:
    """Return classified images of 16 pixels a side."""
    return {"pixel_values": numbers(seed, 3, IMAGE, IMAGE), "labels": integers(seed, 0, 2)}


def large_images(seed: int) -> Batch:
    """Return classified images of 64 pixels a side."""
    return {
        "pixel_values": numbers(seed, 3, LARGE_IMAGE, LARGE_IMAGE),
        "labels": integers(seed, 0, 2),
    }


def segmented_images(seed: int) -> Batch:
    """Return images with a class for each pixel; 255 is ignored."""
    labels = integers(seed, 0, 2, LARGE_IMAGE, LARGE_IMAGE)
    labels[1:, :8] = 255
    return {"pixel_values": numbers(seed, 3, LARGE_IMAGE, LARGE_IMAGE), "labels": labels}


def captioned_images(seed: int) -> Batch:
    """Return images and the words that belong to each; the loss tells them apart."""
    found = words(seed)
    found[:, -1] = WORDS - 1
    return {"input_ids": found, "pixel_values": numbers(seed, 3, IMAGE, IMAGE), "return_loss": True}


def spectrograms(seed: int) -> Batch:
    """Return sounds of 8 frequencies and 32 times, with the words that are spoken."""
    return {"input_features": numbers(seed, 8, 32), "labels": words(seed)}


def waves(seed: int) -> Batch:
    """Return classified sounds of 4000 samples."""
    return {"input_values": numbers(seed, 4000), "labels": integers(seed, 0, 2)}


def spoken_waves(seed: int) -> Batch:
    """Return sounds of 4000 samples with the words that are spoken."""
    return {"input_values": numbers(seed, 4000), "labels": words(seed, 3)}
