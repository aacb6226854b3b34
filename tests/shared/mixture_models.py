"""Tiny mixtures of experts: one that loops over modules, and those of Hugging Face.

They compute in fp64 throughout, loss included, so that two ways to divide a model agree to 1e-9.
"""

import torch
from torch import nn
from torch.nn import functional as F

from stacks import Parts

WORDS, WIDTH, INNER = 61, 32, 48


class Expert(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LoopedExperts(nn.Module):
    """A block that calls an expert only if a token has chosen it, and writes in place."""

    def __init__(self, experts):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x):
        hidden = self.norm(x)
        weights, chosen = self.router(hidden).softmax(-1).max(-1)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] += weights[mask].unsqueeze(-1) * expert(hidden[mask])
        return x + out


def looped(experts=18):
    """Return blocks of looped experts between an embedding and a head, in fp64.

    The default is more experts than tokens: some get no token, and no gradient.
    """

    def compute(m, input_ids):
        x = m.words(input_ids)
        for block in m.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(m.head(x).flatten(0, 1), input_ids.flatten())}

    blocks = nn.ModuleList(LoopedExperts(experts) for _ in range(2))
    words = nn.Embedding(WORDS, WIDTH)
    return Parts(compute, words=words, blocks=blocks, head=nn.Linear(WIDTH, WORDS)).double()


COMMON = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}

DBRX = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "n_heads": 4,
    "n_layers": 2,
    "pad_token_id": 0,
    "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
}

FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8}),
    "granite": ("GraniteMoe", {"num_local_experts": 4}),
    "jetmoe": ("JetMoe", {"num_local_experts": 4, "kv_channels": 8}),
    "dbrx": ("Dbrx", DBRX),
}
"""Gates in halves, interleaved with biases, and in modules of their own; weights in two dims."""


def huggingface(name, implementation="eager"):
    """Return a model of Hugging Face in fp64, without zeros: they hide a bias added twice."""
    import transformers

    family, options = FAMILIES[name]
    options = options if name == "dbrx" else {**COMMON, **options}
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    if implementation is not None:
        model.set_experts_implementation(implementation)
    model.loss_function = _word_loss
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _word_loss(logits, labels, vocab_size=None, **_):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _words():
    return torch.randint(3, WORDS, (4, 4), generator=torch.Generator().manual_seed(5))


BATCH = {"input_ids": _words()}
LABELED = {"input_ids": _words(), "labels": _words()}
