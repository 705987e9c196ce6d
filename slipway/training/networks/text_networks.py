"""Networks for texts: a bag of hashed n-grams, a small transformer, and the user's own.

Their input is the bytes or the tokens of a text (slipway/inputs/texts.py). The network itself turns
bytes into n-grams, by integer arithmetic, so the exported graph needs no other preprocessing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipway.config.network_arguments import HashedNgramsArguments, SmallTransformerArguments
from slipway.inputs.texts import TRUNCATED, TextContract
from slipway.kinds.inputs import ENCODER
from slipway.kinds.registry import input_kind
from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code
from slipway.training.networks.blocks import forward_by_blocks
from slipway.training.networks.divided_layers import DividedLayer
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.user_network import user_backbone

_PRIME, _MODULUS = 1_000_003, 2**31 - 1  # constants of the hashes, whose products stay below 2**63
_WORD_BYTES = 32  # only the last bytes of a longer word count
_MASKED = -1e4  # a score of attention to padding: its weight is 0, and fp16 holds the number
_EMBEDDING_STD = 0.02  # deviation of a transformer's first embeddings (Devlin et al. 2018)
_NO_NGRAM = 0  # the row of the table for positions without an n-gram


class TextNetwork(Network):
    """Maps bytes (rows, max_bytes) uint8, or tokens (rows, up to max_tokens) int32, to logits.

    Logits are (rows, classes). For a numeric target the output is (rows, 1) in its unit.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Map bytes or tokens (B, L) uint8 or int32 to outputs (B, K)."""
        places = self.backbone_inputs(rows)
        # The planner traces tensors without content, which have a class of their own.
        if not torch.compiler.is_exporting() and type(rows) is Tensor:
            places = _without_padding(places)
        return self.to_target_unit(self.backbone(places))

    def backbone_inputs(self, rows: Tensor) -> Tensor:
        """Return bytes or tokens (B, L) as int64, without the mark of a truncated text."""
        return self._places(rows.to(torch.int64))

    def _places(self, rows: Tensor) -> Tensor:
        """Remove the mark of a truncated text from (B, L) int64 bytes or tokens."""
        if self.spec.input.varies_in_length:
            return rows.abs()
        return torch.where(rows == TRUNCATED, 0, rows)

    def misfit(self, error: Exception) -> str:
        """Return a sentence on why the network cannot read such texts, and the remedy."""
        has_tokens = self.spec.input.varies_in_length
        unit, key = ("tokens", "max_tokens") if has_tokens else ("bytes", "max_text_bytes")
        return (
            f"cannot take texts of {self.spec.input.shape[0]} {unit}: {error}. Change "
            f"precompute.{key} or train.network_arguments."
        )


class UserTextNetwork(TextNetwork):
    """Maps bytes or tokens to outputs of the user's module, which reads (rows, length) float32."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map bytes or tokens (B, L) uint8 or int32 to outputs (B, K)."""
        return self.to_target_unit(self.backbone(self.backbone_inputs(rows)))

    def backbone_inputs(self, rows: Tensor) -> Tensor:
        """Return bytes or tokens (B, L) as float32, without the mark of a truncated text."""
        return self._places(rows.to(torch.float32))


class HashedNgrams(nn.Module):
    """A linear model on n-gram embeddings, like fastText (Joulin et al. 2016, arXiv:1607.01759).

    N-grams consist of words, or of the bytes of whole characters. For each n, the embeddings are
    added up and divided by the square root of their number. All n-grams share one hash table.
    """

    def __init__(self, arguments: HashedNgramsArguments, num_outputs: int) -> None:
        super().__init__()
        self._lengths = sorted(arguments.byte_ngrams)
        self._num_words, self._buckets = arguments.word_ngrams, arguments.buckets
        self._lowercase = arguments.lowercase
        self.table = nn.Embedding(self._buckets + 1, arguments.width, padding_idx=_NO_NGRAM)
        with torch.no_grad():
            self.table.weight[1:].normal_(std=1 / arguments.width)
        self.dropout = nn.Dropout(arguments.dropout)
        num_families = len(self._lengths) + self._num_words
        self.head = nn.Linear(num_families * arguments.width, num_outputs)

    def forward(self, places: Tensor) -> Tensor:
        """Map bytes (B, L) int64, 0 for padding, to outputs (B, K)."""
        # Not nn.EmbeddingBag, which becomes a loop over rows in ONNX.
        pooled = [self._pooled(family) for family in self.families(places)]
        logits: Tensor = self.head(self.dropout(torch.cat(pooled, dim=1)))
        return logits

    def families(self, places: Tensor) -> list[Tensor]:
        """Return one tensor (B, L) of hash buckets for each n; 0 stands for no n-gram."""
        if self._lowercase:
            places = torch.where((places >= ord("A")) & (places <= ord("Z")), places + 32, places)
        return [*self._byte_ngrams(places), *self._word_ngrams(places)]

    def _pooled(self, buckets: Tensor) -> Tensor:
        """Pool the embeddings of buckets (B, L) to (B, width)."""
        count = (buckets != _NO_NGRAM).sum(dim=1, keepdim=True).clamp(min=1)
        embedded: Tensor = self.table(buckets)
        return embedded.sum(dim=1) * count.to(embedded.dtype).rsqrt()

    def _byte_ngrams(self, places: Tensor) -> list[Tensor]:
        """Return for each n the bucket of the n-gram that starts at each byte, (B, L)."""
        found = []
        hashes = torch.zeros_like(places)
        begins = _begins_character(places) & (places > 0)
        for length in range(1, max(self._lengths, default=0) + 1):
            last = _later(places, length - 1)
            hashes = (hashes * _PRIME + last + 1) % _MODULUS
            if length in self._lengths:
                is_whole = begins & (last > 0) & _begins_character(_later(places, length))
                found.append(self._buckets_of(hashes, length, is_whole))
        return found

    def _word_ngrams(self, places: Tensor) -> list[Tensor]:
        """Return for each n the bucket of the n-gram that starts at each word, (B, L)."""
        if not self._num_words:
            return []
        words = _words(places)
        found = []
        hashes = torch.zeros_like(words)
        for length in range(1, self._num_words + 1):
            last = _later(words, length - 1)
            hashes = (hashes * _PRIME + last) % _MODULUS
            found.append(self._buckets_of(hashes, -length, last > 0))
        return found

    def _buckets_of(self, hashes: Tensor, family: int, is_there: Tensor) -> Tensor:
        mixed = (hashes * 31 + family * 7919 + _MODULUS) % self._buckets + 1
        return torch.where(is_there, mixed, _NO_NGRAM)


class SmallTransformer(nn.Module):
    """A transformer over patches of bytes, or over tokens, with a learned output token."""

    def __init__(
        self, arguments: SmallTransformerArguments, contract: TextContract, num_outputs: int
    ) -> None:
        super().__init__()
        width, self._patch = arguments.width, arguments.patch
        self._num_heads = arguments.num_heads
        self._num_patches = -(-contract.shape[0] // self._patch)
        # 0 is padding; a byte stands for itself, a token for the row behind its id.
        num_values = contract.vocabulary_size + contract.varies_in_length
        self.bytes = nn.Embedding(num_values, width, padding_idx=0)
        with torch.no_grad():
            # Drawn as in BERT: drawn from N(0, 1), the rare values would drown the learned ones.
            self.bytes.weight[1:].normal_(std=_EMBEDDING_STD)
        self.patches = nn.Linear(self._patch * width, width)
        self.positions = nn.Parameter(torch.randn(self._num_patches, width) * 0.02)
        self.first = nn.Parameter(torch.randn(width) * 0.02)
        self.blocks = nn.ModuleList(
            _TransformerBlock(arguments) for _ in range(arguments.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, places: Tensor) -> Tensor:
        """Map bytes or tokens (B, L) int64, 0 for padding, to outputs (B, K)."""
        return forward_by_blocks(self, places)

    def before_blocks(self, places: Tensor) -> Tensor:
        """Map bytes or tokens (B, L) to the input of the first block, (B, T, W)."""
        places = self._patches_of(places)
        embedded = self.bytes(places).flatten(2)
        tokens = self.patches(embedded) + self.positions[: places.shape[1]]
        first = self.first.expand(places.shape[0], 1, -1)
        return torch.cat([first, tokens], dim=1)

    def block_arguments(self, places: Tensor) -> list[tuple[Tensor]]:
        """Return the second argument of each block: the additive attention mask (B, 1, 1, T)."""
        # The first is never masked: attention to nothing is NaN.
        is_there = F.pad(self._patches_of(places).amax(dim=2) > 0, (1, 0), value=True)
        return [(torch.where(is_there, 0.0, _MASKED)[:, None, None, :],)] * len(self.blocks)

    def after_blocks(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Map the last block's output (B, T, W) to the network's outputs (B, K)."""
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def after_modules(self) -> list[nn.Module]:
        """Return the modules that only `after_blocks` uses."""
        return [self.norm, self.head]

    def _patches_of(self, places: Tensor) -> Tensor:
        """Map (B, L) to patches (B, N, P); the last one is padded."""
        num_patches = -(-places.shape[1] // self._patch)
        places = F.pad(places, (0, num_patches * self._patch - places.shape[1]))
        return places.reshape(places.shape[0], num_patches, self._patch)

    def parallel_blocks(self) -> list[nn.Module]:
        """Return the blocks in the order in which they run."""
        return list(self.blocks)

    def parallel_layers(self) -> list[DividedLayer]:
        """Return the linear layers of a block that can be divided over processes."""
        heads, columns = self._num_heads, 2 * self.norm.normalized_shape[0]
        return [
            DividedLayer("queries_keys_values", "outputs", heads, "heads", parts=3),
            DividedLayer("attended", "inputs", heads, "heads"),
            DividedLayer("layer.0", "outputs", columns),
            DividedLayer("layer.2", "inputs", columns),
        ]


class _TransformerBlock(nn.Module):
    """Attention and a feed-forward layer of twice the width, with normalisation before each."""

    def __init__(self, arguments: SmallTransformerArguments) -> None:
        super().__init__()
        width = arguments.width
        self._head_width = width // arguments.num_heads
        self.attention_norm, self.layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.layer = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(arguments.dropout)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Map tokens (B, T, W) to (B, T, W); `mask` (B, 1, 1, T) is added to attention scores."""
        split = self.queries_keys_values(self.attention_norm(tokens)).chunk(3, dim=2)
        shape = (*tokens.shape[:2], -1, self._head_width)
        queries, keys, values = (part.reshape(shape).transpose(1, 2) for part in split)
        mask = mask.to(queries.dtype)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask).transpose(1, 2)
        tokens = tokens + self.dropout(self.attended(attended.flatten(2)))
        answer: Tensor = tokens + self.dropout(self.layer(self.layer_norm(tokens)))
        return answer


def text_network(spec: NetworkSpec) -> TextNetwork:
    """Build the network of a spec for texts. Raises ParamsError for an unknown name."""
    assert isinstance(spec.input, TextContract)
    if spec.name == "hashed_ngrams":
        if spec.input.tokenizer:
            raise ParamsError(
                "train.network is 'hashed_ngrams', which reads bytes, but the packed store has "
                "tokens. Set precompute.tokenizer to null, or name 'small_transformer'."
            )
        arguments = parse_arguments(spec, HashedNgramsArguments)
        return TextNetwork(HashedNgrams(arguments, spec.num_outputs), spec)
    if spec.name == "small_transformer":
        settings = parse_arguments(spec, SmallTransformerArguments)
        if spec.input.tokenizer and settings.patch > 1:
            raise ParamsError(
                f"train.network_arguments.patch is {settings.patch}, but the packed store has "
                "tokens, which this network reads one by one. Set it to 1."
            )
        backbone = SmallTransformer(settings, spec.input, spec.num_outputs)
        return TextNetwork(backbone, spec)
    if spec.name == ENCODER:
        from slipway.training.networks import encoders  # transformers takes seconds

        return TextNetwork(encoders.encoder_backbone(spec), spec)
    if is_user_code(spec.name):
        return UserTextNetwork(user_backbone(spec, spec.input.shape), spec)
    expected = " or ".join(map(repr, input_kind(spec.input.kind).networks))
    raise ParamsError(f"train.network is {spec.name!r}, expected {expected} for texts.")


def _without_padding(places: Tensor) -> Tensor:
    """Drop the columns that are padding in every text of the batch; they affect no output."""
    longest = int((places > 0).any(dim=0).sum())
    return places[:, : max(_WORD_BYTES, longest)]


def _begins_character(places: Tensor) -> Tensor:
    """Return a mask (B, L): True for the first byte of each UTF-8 character."""
    return (places < 0x80) | (places >= 0xC0)


def _words(places: Tensor) -> Tensor:
    """Return the hashes of a text's words in order, (B, L): above 0, and 0 after the last word.

    A word is a run of letters, digits and bytes beyond ASCII.
    """
    is_part = (
        (places >= 0x80)
        | ((places >= ord("0")) & (places <= ord("9")))
        | ((places >= ord("A")) & (places <= ord("Z")))
        | ((places >= ord("a")) & (places <= ord("z")))
    )
    # Afterwards the hash at each byte covers its word up to there: each round doubles the bytes
    # that it covers (Hillis and Steele 1986).
    hashes, is_covered = torch.where(is_part, places, 0), is_part
    covered, factor = 1, _PRIME
    while covered < _WORD_BYTES:
        before = _earlier(hashes, covered)
        hashes = torch.where(is_covered, (hashes + before * factor) % _MODULUS, hashes)
        is_covered = is_covered & (_earlier(is_covered.to(torch.int64), covered) > 0)
        covered, factor = 2 * covered, factor * factor % _MODULUS
    is_end = is_part & (_later(is_part.to(torch.int64), 1) == 0)
    order = torch.where(is_end, is_end.to(torch.int64).cumsum(dim=1), 0)  # place 0 takes no word
    empty = F.pad(torch.zeros_like(places), (1, 0))
    return empty.scatter(1, order, torch.where(is_end, hashes + 1, 0))[:, 1:]


def _later(values: Tensor, by: int) -> Tensor:
    """Shift values to the left by `by` positions, (B, L); zeros fill the end."""
    return F.pad(values, (0, by))[:, by:]


def _earlier(values: Tensor, by: int) -> Tensor:
    """Shift values to the right by `by` positions, (B, L); zeros fill the start."""
    return F.pad(values, (by, -by))
