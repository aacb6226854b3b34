"""How good generated titles are: BLEU-4 and ROUGE-1, -2 and -L, with bootstrap intervals.

python examples/titles/evaluate.py runs/titles/merged --pairs runs/titles/pairs.json
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from base import load_model, load_tokenizer
from data import IGNORED, Examples, Pair, is_chinese, prompt_batch, read_split
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError

RESAMPLES = 1000
"""Bootstrap samples of the test set; an interval holds the middle 95% of their scores."""
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, slots=True)
class Score:
    """A score of 0 to 100, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Characters:
    """Takes each Chinese character for a word, and other letters together."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text, as ``rouge_score`` asks for them."""
        return re.findall(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+", text.lower())


def scores(found: Sequence[str], expected: Sequence[str], *, chinese: bool) -> dict[str, Score]:
    """Return corpus BLEU-4 (Papineni et al., 2002) and mean ROUGE F (Lin, 2004), times 100."""
    bleu = BLEU(tokenize="zh" if chinese else "13a")
    result = bleu.corpus_score(list(found), [list(expected)], n_bootstrap=RESAMPLES)
    told = json.loads(result.format(4, is_json=True, signature=str(bleu.get_signature())))
    # sacrebleu leaves the interval out where all resamples have a BLEU of 0.
    middle, half = told.get("confidence_mean", 0.0), told.get("confidence_var", 0.0)
    made = {"BLEU-4": Score(result.score, middle - half, middle + half)}
    scorer = RougeScorer(list(ROUGE), tokenizer=Characters() if chinese else None)
    rows = [scorer.score(one, other) for one, other in zip(expected, found, strict=True)]
    chosen = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    for name in ROUGE:
        each = 100 * np.array([row[name].fmeasure for row in rows])
        low, high = np.percentile(each[chosen].mean(axis=1), [2.5, 97.5])
        made[name.replace("rouge", "ROUGE-")] = Score(float(each.mean()), float(low), float(high))
    return made


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return each row's summed loss and its number of counted tokens, both of shape (rows,)."""
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # a target is the next token
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view(labels.shape).sum(dim=1), (labels != IGNORED).sum(dim=1)


@torch.no_grad()
def held_out_loss(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """Return the mean loss of a title's token, in nats, over the samples of all ranks."""
    model.eval()
    parts = [accelerator.gather_for_metrics(token_losses(model, batch)) for batch in loader]
    model.train()
    losses, counts = (torch.cat(column).double().sum() for column in zip(*parts, strict=True))
    return float(losses / counts)


def generated(
    accelerator: Accelerator, model: nn.Module, loader: Any, tokenizer: Any, length: int
) -> list[str]:
    """Return a title for each pair of a prepared loader: the likeliest token at each place."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    titles: dict[int, str] = {}
    # A cache of keys and values belongs to one rank: the stages of a pipeline compute them again.
    cached = "pp" not in accelerator.mesh or accelerator.mesh["pp"].size == 1
    with accelerator.inference(model) as module:
        for batch in loader:
            numbers, prompts = batch.pop("number"), batch["input_ids"]
            found = module.generate(
                **batch, max_new_tokens=length, do_sample=False, use_cache=cached, **ends
            )[:, prompts.shape[1] :]
            found = F.pad(found, (0, length - found.shape[1]), value=tokenizer.pad_token_id)
            rows = accelerator.gather_for_metrics((numbers, found))
            for number, tokens in zip(*rows, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                titles[int(number)] = " ".join(text.split())
    return [titles[number] for number in sorted(titles)]


def judged(titles: Sequence[str], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return scores and titles as plain values, for a JSON file."""
    found = scores(titles, [pair.title for pair in pairs], chinese=is_chinese(pairs))
    return {"scores": {name: asdict(score) for name, score in found.items()}, "titles": titles}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Judge a folder of Hugging Face, such as the merged model that ``train.py`` leaves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder or hub name of a causal language model")
    parser.add_argument("--pairs", type=Path, required=True, help="pairs.json of a run")
    parser.add_argument("--length", type=int, default=128, help="tokens of text and title")
    parser.add_argument("--title-length", type=int, default=24, help="tokens of a title at most")
    parser.add_argument("--batch", type=int, default=50, help="texts per rank")
    args = parser.parse_args(words)
    if not args.pairs.is_file():
        sys.exit(f"expected the pairs.json of a run, found no {args.pairs}")
    accelerator = Accelerator()
    pairs = read_split("", 0, args.pairs).test
    tokenizer = load_tokenizer(args.model)
    examples = Examples(pairs, tokenizer, args.length, args.title_length)
    loader = torch.utils.data.DataLoader(
        examples,  # type: ignore[arg-type]  # rows by number are all that a loader asks for
        args.batch,
        collate_fn=lambda rows: prompt_batch(rows, tokenizer.pad_token_id),
    )
    model, loader = accelerator.prepare(load_model(args.model), loader)
    titles = generated(accelerator, model, loader, tokenizer, args.title_length)
    found: dict[str, Any] = judged(titles, pairs)["scores"]
    for name, score in found.items():
        accelerator.print(f"{name:8} {Score(**score)}")
    accelerator.end_training()
    return found


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
