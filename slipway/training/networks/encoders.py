"""Fine-tunes encoders from a local Hugging Face folder: all layers, the last ones, or by LoRA.

`train.pretrained` is the folder with config.json, model.safetensors and tokenizer.json. Nothing is
downloaded or unpickled, and no code of the folder runs. The config becomes part of the model's
`arguments`, so a trained model no longer needs the folder. The head is always new.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from slipway.config.network_arguments import EncoderArguments
from slipway.inputs.texts import TextContract, read_tokenizer
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.networks.blocks import forward_by_blocks
from slipway.training.networks.divided_layers import DividedLayer
from slipway.training.networks.networks import Network, NetworkSpec, build_network

# Families of transformers whose encoders are exported and tested.
FAMILIES = (
    *("bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
)
# For each family: the linear layers of a layer that processes can share, see DividedLayer.
_BERT_LAYERS: list[tuple[str, Literal["outputs", "inputs"], Literal["heads", "columns"], int]] = [
    ("attention.self.query", "outputs", "heads", 1),
    ("attention.self.key", "outputs", "heads", 1),
    ("attention.self.value", "outputs", "heads", 1),
    ("attention.output.dense", "inputs", "heads", 1),
    ("intermediate.dense", "outputs", "columns", 1),
    ("output.dense", "inputs", "columns", 1),
]
_DIVIDED: dict[str, Any] = {
    "distilbert": [
        ("attention.q_lin", "outputs", "heads", 1),
        ("attention.k_lin", "outputs", "heads", 1),
        ("attention.v_lin", "outputs", "heads", 1),
        ("attention.out_lin", "inputs", "heads", 1),
        ("ffn.lin1", "outputs", "columns", 1),
        ("ffn.lin2", "inputs", "columns", 1),
    ],
    "modernbert": [
        ("attn.Wqkv", "outputs", "heads", 3),
        ("attn.Wo", "inputs", "heads", 1),
        ("mlp.Wi", "outputs", "columns", 2),
        ("mlp.Wo", "inputs", "columns", 1),
    ],
}
_BEHIND_PADDING = ("camembert", "roberta", "xlm-roberta")  # positions begin behind its id
WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
# Keys of a config that describe another head, another file or the writer.
_FOREIGN = ("architectures", "auto_map", "_name_or_path", "id2label", "label2id", "dtype")
_MASKED = -1e4  # added to a score of attention: its weight is 0, and fp16 holds the number
_SAVE = "AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER, safe_serialization=True)"


class EncoderBackbone(nn.Module):
    """A text encoder, pooling over tokens (by mean or first token), and a linear head."""

    def __init__(
        self,
        encoder: Any,
        arguments: EncoderArguments,
        num_outputs: int,
        padding: int,
        separator: int | None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(arguments.dropout)
        self.head = nn.Linear(encoder.config.hidden_size, num_outputs)
        self._is_mean, self._padding = arguments.pooling == "mean", padding
        self._separator = separator  # tokens after it have type 1; None if there is one type
        if arguments.checkpoint_activations:
            encoder.activation_checkpointing_enable()
        if arguments.lora_rank is not None:
            _adapt(encoder, arguments.lora_rank)

    def forward(self, places: Tensor) -> Tensor:
        """Map token ids plus 1, (B, L) int64 with 0 for padding, to outputs (B, K)."""
        return forward_by_blocks(self, places)

    def before_blocks(self, places: Tensor) -> Tensor:
        """Map token ids plus 1, (B, L), to the embeddings that the first layer reads, (B, L, W)."""
        ids = torch.where(places > 0, places - 1, self._padding)
        types = {} if self._separator is None else {"token_type_ids": self._types(ids)}
        values: Tensor = self.encoder.embeddings(input_ids=ids, **types)
        if hasattr(self.encoder, "embeddings_project"):  # ELECTRA with narrow embeddings
            values = self.encoder.embeddings_project(values)
        return values

    def block_arguments(self, places: Tensor) -> list[tuple[Any, ...]]:
        """Return the arguments of each layer: additive mask of attention (B, 1, 1 or L, L).

        For ModernBERT also the rotary position embeddings; both depend on the kind of the layer.
        """
        # The first place is never masked: attention to nothing is NaN.
        order = torch.arange(places.shape[1], device=places.device)
        mask = torch.where((places > 0) | (order == 0), 0.0, _MASKED).to(self.head.weight.dtype)
        mask = mask[:, None, None, :]
        encoder, layers = self.encoder, self.parallel_blocks()
        if encoder.config.model_type != "modernbert":
            return [(mask,)] * len(layers)
        is_near = (order[:, None] - order[None, :]).abs() <= encoder.config.sliding_window
        window = torch.where(is_near, 0.0, _MASKED).to(mask.dtype)
        masks = {"full_attention": mask, "sliding_attention": torch.minimum(mask, window)}
        of_kind = {
            kind: (masks[kind], encoder.rotary_emb(mask, order[None, :], kind))
            for kind in set(encoder.config.layer_types)
        }
        return [of_kind[layer.attention_type] for layer in layers]

    def after_blocks(self, states: Tensor, places: Tensor) -> Tensor:
        """Pool the last layer's output (B, L, W) over the tokens, and map it to outputs (B, K)."""
        states = getattr(self.encoder, "final_norm", nn.Identity())(states)  # of ModernBERT
        if self._is_mean:
            weights = (places > 0).to(states.dtype)[:, :, None]
            pooled = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        else:
            pooled = states[:, 0]
        logits: Tensor = self.head(self.dropout(pooled))
        return logits

    def after_modules(self) -> list[nn.Module]:
        """Return the modules that only `after_blocks` uses."""
        return [self.head, getattr(self.encoder, "final_norm", self.dropout)]

    def named_parts(self) -> list[list[str]]:
        """Return the names of all parameters in groups: embeddings, each layer, then the head."""
        layers = _layers(self.encoder)
        names = [name for name, _ in self.named_parameters()]
        places = {id(each): place for place, each in enumerate(layers, start=1)}
        owner = {
            f"{module_name}.{name}": places[id(module)]
            for module_name, module in self.named_modules()
            if id(module) in places
            for name, _ in module.named_parameters()
        }
        parts: list[list[str]] = [[] for _ in range(len(layers) + 2)]
        for name in names:
            is_before = name.startswith("encoder.embeddings")
            parts[owner.get(name, 0 if is_before else -1)].append(name)
        return parts

    def parallel_blocks(self) -> list[Any]:
        """Return the encoder's layers in order."""
        return list(_layers(self.encoder))

    def parallel_layers(self) -> list[DividedLayer]:
        """Return the linear layers of a block that processes divide, with their adapters."""
        config, block = self.encoder.config, _layers(self.encoder)[0]
        found = []
        for name, by, unit, parts in _DIVIDED.get(config.model_type, _BERT_LAYERS):
            module: Any = block.get_submodule(name)
            size = module.out_features // parts if by == "outputs" else module.in_features
            groups = config.num_attention_heads if unit == "heads" else size
            if not hasattr(module, "base_layer"):
                found.append(DividedLayer(name, by, groups, unit, parts))
                continue
            # Of an adapter's two matrices, only the one next to the divided dimension is divided.
            adapter = "lora_B" if by == "outputs" else "lora_A"
            for part in ("base_layer", f"{adapter}.default"):
                found.append(DividedLayer(f"{name}.{part}", by, groups, unit, parts))
        return found

    def load_body(self, state: Mapping[str, Tensor]) -> None:
        """Load the encoder's weights, which do not include adapters."""
        own = self.encoder.state_dict()
        names = {name.replace(".base_layer.", "."): name for name in own if ".lora_" not in name}
        given = {name: state[plain] for plain, name in names.items() if plain in state}
        if lacking := sorted(set(names) - set(state)):
            raise ParamsError(
                f"train.pretrained lacks {', '.join(lacking[:5])}, which a "
                f"{type(self.encoder).__name__} has. Use a folder with all of its weights."
            )
        self.encoder.load_state_dict(given, strict=False)

    def _types(self, ids: Tensor) -> Tensor:
        """Return token types (B, L): 0 up to the first separator, 1 after it."""
        is_separator = torch.eq(ids, self._separator or 0).to(torch.int64)
        return (is_separator.cumsum(dim=1) - is_separator).clamp(max=1)

    def load_file(self, path: Path) -> bool:
        """Load the encoder's weights from a file; return False if the names of tensors differ."""
        prefix = f"{self.encoder.base_model_prefix}."
        with safe_open(path, framework="pt") as file:
            places = {name.removeprefix(prefix): name for name in list(file.keys())}
        own = self.encoder.state_dict()
        names = {name: name.replace(".base_layer.", ".") for name in own if ".lora_" not in name}
        if not places.keys() >= set(names.values()):
            return False
        for name, plain in names.items():
            # Opened for each tensor, because the pages of an open file stay in memory.
            with safe_open(path, framework="pt") as file:
                value = file.get_tensor(places[plain])
            if value.shape != own[name].shape:
                return False
            own[name].copy_(value)
        return True


def encoder_backbone(spec: NetworkSpec) -> EncoderBackbone:
    """Build the encoder of a spec with random weights.

    Raises ParamsError if the input does not fit the encoder.
    """
    assert isinstance(spec.input, TextContract)
    arguments = {name: value for name, value in spec.arguments.items() if name != "config"}
    parsed = EncoderArguments.model_validate(arguments)
    if spec.input.tokenizer is None:
        raise ParamsError(
            "train.network is 'encoder', but the packed store has bytes. Set precompute.tokenizer "
            "to the folder in train.pretrained."
        )
    config = dict(spec.arguments.get("config") or {})
    transformers = _import_transformers()
    try:
        described = transformers.AutoConfig.for_model(**config)
        encoder = transformers.AutoModel.from_config(described, attn_implementation="sdpa")
    except Exception as error:  # a config that does not fit together raises any kind of error
        raise ParamsError(
            f"transformers cannot build the encoder described by config.json: {error}"
        ) from error
    if hasattr(encoder, "pooler"):
        encoder.pooler = None  # the pooler would be a part of the head, which is new
    padding = int(described.pad_token_id or 0)
    behind = padding + 1 if described.model_type in _BEHIND_PADDING else 0
    longest, found = described.max_position_embeddings - behind, spec.input.shape[0]
    if found > longest:
        raise ParamsError(
            f"precompute.max_tokens is {found}, but the encoder in train.pretrained reads at most "
            f"{longest}. Set it to {longest} or less."
        )
    if spec.input.vocabulary_size > described.vocab_size:
        raise ParamsError(
            f"precompute.tokenizer has {spec.input.vocabulary_size:,} tokens, but the encoder in "
            f"train.pretrained has only {described.vocab_size:,}: they do not match. Set "
            "precompute.tokenizer to the same folder."
        )
    has_types = spec.input.has_pair_types and getattr(described, "type_vocab_size", 1) > 1
    separator = spec.input.pair_separator if has_types else None
    return EncoderBackbone(encoder, parsed, spec.num_outputs, padding, separator)


def read_config(folder: Path) -> dict[str, Any]:
    """Read an encoder's config.json, without the keys that describe its original head.

    Raises ParamsError if the file is not readable or describes an unknown family of models.
    """
    try:
        content = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParamsError(
            f"train.pretrained is {str(folder)!r}, whose {_CONFIG} cannot be read ({error}); "
            "expected a folder that save_pretrained() wrote."
        ) from None
    family = content.get("model_type") if isinstance(content, dict) else None
    if family not in FAMILIES:
        raise ParamsError(
            f"train.pretrained is {str(folder)!r}, a model of the type {family!r}, expected an "
            f"encoder: {', '.join(FAMILIES)}."
        )
    return {key: value for key, value in content.items() if key not in _FOREIGN}


def encoder_weights(folder: Path) -> Path:
    """Return the file of weights in `folder`.

    Raises ParamsError if the file is missing or exists only as a pickle.
    """
    path = folder / WEIGHTS
    if path.is_file():
        return path
    wrong = f"train.pretrained is {str(folder)!r}, expected a folder with {WEIGHTS}"
    pickled = sorted(file.name for ending in _PICKLES for file in folder.glob(ending))
    if pickled:
        wrong += f"; {', '.join(pickled)} is not read, because loading it may run code"
    raise ParamsError(f"{wrong}. Convert it on a machine where you may run its code: {_SAVE}")


def load_encoder(network: Network, folder: Path) -> None:
    """Load the encoder's weights from `folder`.

    Raises ParamsError if the weights or the tokenizer do not fit.
    """
    encoder_weights(folder)
    contract, backbone = network.spec.input, network.backbone
    assert isinstance(contract, TextContract)
    assert isinstance(backbone, EncoderBackbone)
    if read_tokenizer(folder) != contract.tokenizer:
        raise ParamsError(
            f"train.pretrained is {str(folder)!r}, whose tokenizer is not that of the packed store."
            f" Set precompute.tokenizer to {str(folder)!r}, and run `slipway run`."
        )
    if backbone.load_file(folder / WEIGHTS):
        return
    transformers = _import_transformers()
    try:
        donor = transformers.AutoModel.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises errors of any kind
        raise ParamsError(f"train.pretrained {str(folder)!r} cannot be loaded: {error}") from error
    model, report = donor
    missing = set(report["missing_keys"])
    backbone.load_body(
        {name: value for name, value in model.state_dict().items() if name not in missing}
    )


def merged(network: Network) -> Network:
    """Return the network with each adapter merged into its layer.

    Without adapters, returns the network itself.
    """
    spec, backbone = network.spec, network.backbone
    if not isinstance(backbone, EncoderBackbone) or spec.arguments.get("lora_rank") is None:
        return network
    from peft.tuners.lora import LoraLayer

    for module in backbone.modules():
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
    state = {
        name.replace(".base_layer.", "."): value
        for name, value in network.state_dict().items()
        if ".lora_" not in name
    }
    plain = build_network(
        spec.model_copy(update={"arguments": {**spec.arguments, "lora_rank": None}})
    )
    plain.load_state_dict(state, strict=True)
    return plain


def _adapt(encoder: nn.Module, rank: int) -> None:
    """Add LoRA (Hu et al. 2021) to each linear layer, and freeze the rest of the encoder."""
    from peft import LoraConfig, inject_adapter_in_model

    linear = {
        name.rpartition(".")[2]
        for layer in _layers(encoder)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(linear))
    inject_adapter_in_model(config, encoder)


def _layers(encoder: Any) -> nn.ModuleList:
    """Return the encoder's layers: the one `ModuleList` as long as config.json says."""
    return next(
        module
        for module in encoder.modules()
        if isinstance(module, nn.ModuleList) and len(module) == encoder.config.num_hidden_layers
    )


def _import_transformers() -> Any:
    transformers: Any
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise UnavailableError(
            "train.network is 'encoder', but the package transformers is not installed. Install "
            "it: pip install 'slipway-ml[encoders]' (in a clone: make install)."
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
