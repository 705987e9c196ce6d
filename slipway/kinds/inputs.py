"""The kinds of input, one record for each: images, columns and texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.kinds.parts import InputPart, import_part


@dataclass(frozen=True)
class InputKind:
    """A kind of input: facts that every layer may read, and code that is loaded on use."""

    name: str  # `input.kind` of a bundle
    graph_input: str  # name of the ONNX graph's input
    content_type: str  # of a request with a single row
    many_per_request: bool  # a JSON object {"rows": [...]} may carry several rows
    ids_from_cells: bool  # a row's id is the digest of its cells in the user's table
    has_pixels: bool  # a row is (height, width, channels) uint8, which reports show as a picture
    takes_files: bool  # a request may carry several rows as files of a form
    # The networks and the classes of their arguments; the first is the default. "timm/NAME" stands
    # for every network of timm, which checks its arguments itself.
    networks: Mapping[str, str | None]
    # Keys of params.yaml that have an effect only for this kind, or for the kinds that name them.
    # For other kinds, any value but the default is refused.
    keys: tuple[str, ...]
    parts: Mapping[InputPart, str]
    # The members of `networks` that are gradient-boosted trees, which have no gradient steps.
    trees: tuple[str, ...] = ()
    # The members of `networks` with blocks that several processes can share.
    divisible: tuple[str, ...] = ()
    has_texts: bool = False  # a row consists of texts from columns of a table
    endings: tuple[str, ...] = ()  # suffixes of further raw files: not tables, archives or folders

    def load_part(self, part: InputPart) -> Any:
        """Import the function or class of a part; KeyError if this kind does not have it."""
        return import_part(self.parts[part])


def network_family(name: str) -> str:
    """Return the key of a network in `networks`: "timm/NAME" for every network of timm."""
    return TIMM if name.startswith("timm/") else name


TIMM = "timm/NAME"
ENCODER = "encoder"  # a Hugging Face encoder from the local folder in `train.pretrained`
IMAGES = InputKind(
    name="images",
    graph_input="image",
    content_type="application/octet-stream",
    many_per_request=False,
    ids_from_cells=False,
    has_pixels=True,
    takes_files=True,
    networks={
        "small_resnet": "slipway.config.network_arguments:SmallResnetArguments",
        TIMM: None,
    },
    keys=(
        "data.image_column",
        "data.engine",
        "clean.max_pixels",
        "clean.num_workers",
        "clean.min_side_px",
        "clean.near_duplicate_bits",
        "clean.constant_std",
        "clean.blur_variance",
        "clean.dark_mean",
        "clean.bright_mean",
        "clean.max_aspect",
        "clean.rules.wrong_extension",
        "clean.rules.too_small",
        "clean.rules.constant_image",
        "clean.rules.blurred",
        "clean.rules.too_dark",
        "clean.rules.too_bright",
        "clean.rules.odd_aspect",
        "precompute.image_size_px",
        "precompute.train_size_px",
        "precompute.channels",
        "precompute.resize_mode",
        "precompute.interpolation",
        "precompute.encoding",
        "precompute.jpeg_quality",
        "precompute.transform",
        "precompute.num_workers",
        "augment.random_resized_crop",
        "augment.crop_aspect",
        "augment.rotation_deg",
        "augment.scale",
        "augment.translation",
        "augment.crop_padding_px",
        "augment.horizontal_flip",
        "augment.vertical_flip",
        "augment.brightness",
        "augment.contrast",
        "augment.saturation",
        "augment.hue",
        "augment.erasing",
        "augment.erasing_area",
        "augment.mixup_alpha",
        "augment.cutmix_alpha",
        "augment.mix_probability",
        "augment.forbid",
        "augment.offline_copies",
    ),
    parts={
        "contract": "slipway.inputs.images:ImageContract",
        "check_source": "slipway.data.images.cleaning:check_images",
        "clean": "slipway.data.images.cleaning:clean_images",
        "merge": "slipway.data.merge.images:merge_images",
        "pack": "slipway.data.images.pack_step:pack_images",
        "raw_rows": "slipway.data.sources.sources:raw_images",
        "network": "slipway.training.networks.image_networks:image_network",
        "early_spec": "slipway.training.networks.initialization:image_network_spec",
        "resize_rows": "slipway.inputs.images:resize_rows",
        "input_features": "slipway.drift.image_features:image_features",
        "measure_features": "slipway.drift.image_features:measure_images",
        "data_sections": "slipway.reports.pages.sections.pictures:picture_sections",
        "receive": "slipway.serving.requests.bodies:receive_images",
        "decoder": "slipway.serving.requests.decoding:ImageDecoder",
        "api": "slipway.serving.schemas:ImageApi",
        "describe_tensors": "slipway.serving.open_inference.conversion:describe_image",
        "read_tensors": "slipway.serving.open_inference.conversion:read_images",
        "items": "slipway.inference.images:ImageReader",
        "source": "slipway.inference.sources:ImageFiles",
        "explain": "slipway.predictor.explaining.explanation:explain_image",
    },
)
COLUMNS = InputKind(
    name="columns",
    graph_input="row",
    content_type="application/json",
    many_per_request=True,
    ids_from_cells=True,
    has_pixels=False,
    takes_files=False,
    networks={
        "tabm": "slipway.config.network_arguments:TabmArguments",
        "lightgbm": "slipway.config.network_arguments:LightgbmArguments",
    },
    trees=("lightgbm",),
    keys=(
        "data.columns",
        "data.missing_values",
        "data.date_format",
        "data.decimal",
        "data.thousands",
        "clean.rules.duplicate_row",
        "clean.rules.type_violation",
        "clean.rules.out_of_range",
        "clean.rules.all_missing",
        "clean.rules.constant_column",
        "clean.rules.duplicate_column",
        "precompute.max_categories",
        "precompute.num_quantiles",
        "export.background_rows",
    ),
    parts={
        "contract": "slipway.inputs.columns:ColumnContract",
        "check_source": "slipway.data.tables.clean_step:check_table",
        "clean": "slipway.data.tables.clean_step:clean_rows",
        "merge": "slipway.data.merge.tables:merge_tables",
        "pack": "slipway.data.tables.packing:pack_rows",
        "raw_rows": "slipway.data.tables.source:raw_rows",
        "network": "slipway.training.networks.tables:table_network",
        "fit_trees": "slipway.training.trees.booster:fit_trees",
        "train_trees": "slipway.training.tree_run:train_trees",
        "input_features": "slipway.drift.column_features:column_features",
        "measure_features": "slipway.drift.column_features:measure_columns",
        "data_sections": "slipway.reports.pages.sections.columns:column_sections",
        "positions": "slipway.inputs.columns:positions_of",
        "row_cells": "slipway.reports.pages.cells:column_cells",
        "receive": "slipway.serving.requests.bodies:receive_rows",
        "decoder": "slipway.serving.requests.rows:RowDecoder",
        "api": "slipway.serving.schemas:RowApi",
        "describe_tensors": "slipway.serving.open_inference.conversion:describe_columns",
        "read_tensors": "slipway.serving.open_inference.conversion:read_columns",
        "items": "slipway.inference.rows:RowReader",
        "source": "slipway.inference.sources:TableFile",
        "explain": "slipway.predictor.explaining.explanation:explain_row",
    },
)
TEXTS = InputKind(
    name="texts",
    has_texts=True,
    graph_input="text",
    content_type="application/json",
    many_per_request=True,
    ids_from_cells=True,
    has_pixels=False,
    takes_files=False,
    networks={
        "hashed_ngrams": "slipway.config.network_arguments:HashedNgramsArguments",
        "small_transformer": "slipway.config.network_arguments:SmallTransformerArguments",
        ENCODER: "slipway.config.network_arguments:EncoderArguments",
    },
    divisible=("small_transformer", ENCODER),
    keys=(
        "data.text_columns",
        "clean.min_characters",
        "clean.max_characters",
        "clean.rules.type_violation",
        "clean.rules.too_short",
        "clean.rules.too_long",
        "clean.rules.control_characters",
        "clean.near_duplicate_similarity",
        "clean.rules.garbled",
        "clean.rules.mixed_script",
        "clean.rules.rare_script",
        "clean.rules.personal_data",
        "clean.rules.boilerplate",
        "precompute.max_text_bytes",
        "precompute.tokenizer",
        "precompute.vocabulary_size",
        "precompute.max_tokens",
        "precompute.mask_personal_data",
        "augment.token_dropout",
        "augment.word_deletion",
    ),
    parts={
        "contract": "slipway.inputs.texts:TextContract",
        "check_source": "slipway.data.texts.cleaning:check_texts",
        "clean": "slipway.data.texts.cleaning:clean_texts",
        "merge": "slipway.data.merge.tables:merge_tables",
        "pack": "slipway.data.texts.packing:pack_texts",
        "raw_rows": "slipway.data.texts.source:raw_rows",
        "network": "slipway.training.networks.text_networks:text_network",
        "input_features": "slipway.drift.text_features:text_features",
        "measure_features": "slipway.drift.text_features:measure_texts",
        "data_sections": "slipway.reports.pages.sections.texts:text_sections",
        "row_cells": "slipway.reports.pages.cells:text_cells",
        "receive": "slipway.serving.requests.bodies:receive_texts",
        "decoder": "slipway.serving.requests.rows:TextDecoder",
        "api": "slipway.serving.schemas:TextApi",
        "describe_tensors": "slipway.serving.open_inference.conversion:describe_texts",
        "read_tensors": "slipway.serving.open_inference.conversion:read_texts",
        "items": "slipway.inference.texts:TextReader",
        "source": "slipway.inference.sources:text_source",
        "explain": "slipway.predictor.explaining.explanation:explain_text",
    },
)
