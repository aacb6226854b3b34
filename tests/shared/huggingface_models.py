"""Tiny random models of Hugging Face, of several architectures, that compute in fp64 throughout.

Their norms and their loss cast to fp32 otherwise, and no two ways to divide a model would agree to
more than seven digits. Needs the extra ``huggingface``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stacks import Parts

VOCABULARY = 97
"""Words: no power of two, so that no number of ranks divides them."""

HEADS, WIDTH, FEEDFORWARD = 6, 48, 40
"""Of each model: six heads of eight features."""


def llama(layers: int = 2, *, kv_heads: int = 6, tied: bool = False) -> nn.Module:
    """Return a Llama; with fewer key-value heads, grouped-query attention."""
    own = {"num_key_value_heads": kv_heads, "attention_bias": True, "mlp_bias": True}
    return _made("LlamaForCausalLM", layers, tie_word_embeddings=tied, **own)


def gpt2(layers: int = 2, *, dropout: float = 0.0) -> nn.Module:
    """Return a GPT-2: fused and transposed projections, a head tied to the embedding."""
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return _made("GPT2LMHeadModel", layers, n_inner=FEEDFORWARD, **drops, **ends)


def bert(layers: int = 2, *, dropout: float = 0.0) -> nn.Module:
    """Return a BERT: a tied head with a bias of its own, post-norm blocks."""
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return _made("BertForMaskedLM", layers, **drops)


def neox(layers: int = 2) -> nn.Module:
    """Return a GPT-NeoX: projections interleaved by head, attention beside feed-forward."""
    return _made("GPTNeoXForCausalLM", layers, bos_token_id=0, eos_token_id=0)


def _made(name: str, layers: int, **options: object) -> nn.Module:
    """Return a model of transformers by its class; options are those of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=FEEDFORWARD,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        **options,
    )
    return _prepared(kind(config))


def encoder(layers: int = 2, *, dropout: float = 0.0) -> nn.Module:
    """Return ``nn.TransformerEncoder`` between an embedding and a head, in fp64."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, FEEDFORWARD, dropout=dropout, batch_first=True, norm_first=True
    )
    parts = {
        "tokens": nn.Embedding(VOCABULARY, WIDTH),
        "encoder": nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        "head": nn.Linear(WIDTH, VOCABULARY),
    }
    return _prepared(Parts(lambda m, input_ids: m.head(m.encoder(m.tokens(input_ids))), **parts))


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "llama-gqa": lambda layers=2: llama(layers, kv_heads=2),
    "llama-mqa": lambda layers=2: llama(layers, kv_heads=1),
    "gpt2": gpt2,
    "bert": bert,
    "neox": neox,
    "encoder": encoder,
}
"""By name: functions of the number of layers."""


def token_batch(seed: int, rows: int = 2, length: int = 7) -> Tensor:
    """Return tokens, shape (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def logits_of(outputs: Tensor | object) -> Tensor:
    """Return the logits of a model's outputs."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits  # type: ignore[attr-defined]
    return logits


def _prepared(model: nn.Module) -> nn.Module:
    """Return the model in fp64, without zeros: they would hide a bias that is added twice."""
    model = model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


class WithLoss(nn.Module):
    """A model that makes its loss itself, in fp64."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def dummy_inputs(self):
        return {"input_ids": token_batch(0)}

    def forward(self, input_ids):
        return {"loss": word_loss(self.model(input_ids), input_ids)}


def word_loss(output, ids):
    """Return the mean cross entropy of each word by its own logits."""
    logits = logits_of(output)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))
