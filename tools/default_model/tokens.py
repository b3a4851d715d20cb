"""Stage 3: the two tokenizers, from the captions: a small CLIP (byte pairs) and a T5 of whole words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

LENGTH = 16
"""Tokens of a prompt, padding included."""
_WORDS = {"a", "an", "the", "of", "emoji", "picture", "icon"}
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
_MARK = "\u2581"
"""Where a word begins, in SentencePiece's writing."""


def make(work: Path, captions: list[str], names: list[str]) -> None:
    """Writes `tokenizer/` and `tokenizer_2/`. Their vocabulary has the words of all names, not only of the captions."""
    words = sorted(_WORDS | {word for name in names for word in name.replace("-", " ").split()})
    pairs = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    pairs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        end_of_word_suffix="</w>",
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=_LETTERS,
        show_progress=False,
    )
    pairs.train_from_iterator([*captions * 3, *words], trainer)
    model = json.loads(pairs.to_str())["model"]
    vocabulary = model["vocab"]
    for letter in _LETTERS:
        vocabulary.setdefault(letter + "</w>", len(vocabulary))
    merges = [tuple(pair) for pair in model["merges"]]
    CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LENGTH).save_pretrained(work / "tokenizer")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (_MARK, -6.0)]
    pieces += [(_MARK + word, -7.0) for word in words] + [(letter, -12.0) for letter in _LETTERS]
    T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=LENGTH).save_pretrained(work / "tokenizer_2")


def load(work: Path) -> tuple[CLIPTokenizer, T5Tokenizer]:
    """What `make` wrote."""
    return CLIPTokenizer.from_pretrained(work / "tokenizer"), T5Tokenizer.from_pretrained(work / "tokenizer_2")
