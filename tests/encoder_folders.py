"""Local Hugging Face folders for tests: tiny encoders with drawn weights."""

import importlib
import json
from pathlib import Path
from typing import Any

from tests.tokens import bpe

SIZES: dict[str, dict[str, Any]] = {
    family: {
        "vocab_size": 400,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
    }
    for family in ("bert", "electra", "roberta")
}
SIZES["modernbert"] = SIZES["bert"] | {
    **dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 2),
    "layer_types": ["full_attention", "sliding_attention"],
    "local_attention": 8,
}
SIZES["electra"] = SIZES["electra"] | {"embedding_size": 8}
SIZES["distilbert"] = {
    "vocab_size": 400,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}


def tiny_encoder(folder: Path, family: str = "bert", tokenizer: str | None = None) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; return the folder."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **SIZES[family])
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)  # so that each token counts
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer or bpe(), encoding="utf-8")
    return folder


def word_piece() -> str:
    """Return a tokenizer like BERT's, of single Chinese characters and letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{one}" for one in letters)]
    names += ["\u5f88", "\u597d", "\u5403"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    content: str = json.dumps(json.loads(tokenizer.to_str()))
    return content
