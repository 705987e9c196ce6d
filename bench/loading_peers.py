"""The other loaders of `bench.loading`, with 2 workers, used as their documentation says.

python bench/loading_peers.py PEER CASE FOLDER
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, misc"
# mypy: disable-error-code="untyped-decorator"

import io
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this script runs in an environment without this project

from bench.loading_rounds import CASES, Case, serve

NUM_WORKERS = 2


def transform_of(case: Case) -> Any:
    """Return torchvision's transform from a PIL image to a float tensor."""
    from torchvision import transforms

    crop = (
        transforms.RandomCrop(case.size_px, case.padding_px)
        if case.padding_px
        else transforms.RandomResizedCrop(case.size_px)
    )
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])


def decoded(payload: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(payload)).convert("RGB")


def pictures(folder: Path) -> list[tuple[Path, int]]:
    return [(path, int(path.parent.name)) for path in sorted((folder / "images").rglob("*.jpg"))]


def counted(loader: Any) -> Any:
    return lambda: (len(batch[0]) for batch in loader)


def image_folder(case: Case, folder: Path) -> Any:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    images = ImageFolder(str(folder / "images"), transform_of(case))
    return counted(
        DataLoader(
            images, case.batch_size, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True
        )
    )


def hf_parquet(case: Case, folder: Path) -> Any:
    from datasets import Dataset, Image
    from torch.utils.data import DataLoader

    if not (folder / "images.parquet").exists():
        rows = [
            {"image": {"bytes": path.read_bytes(), "path": None}, "label": label}
            for path, label in pictures(folder)
        ]
        Dataset.from_list(rows).cast_column("image", Image()).to_parquet(folder / "images.parquet")
    stored = Dataset.from_parquet(
        str(folder / "images.parquet"), cache_dir=str(folder / "hf_cache")
    )
    transform = transform_of(case)

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "image": [transform(image.convert("RGB")) for image in batch["image"]],
            "label": batch["label"],
        }

    loader = DataLoader(
        stored.with_transform(change),
        case.batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
    )
    return lambda: (len(batch["image"]) for batch in loader)


def web_dataset(case: Case, folder: Path) -> Any:
    import webdataset

    if not (folder / "web-000000.tar").exists():
        with webdataset.ShardWriter(
            str(folder / "web-%06d.tar"), maxcount=-(-len(pictures(folder)) // 4), verbose=0
        ) as writer:
            for path, label in pictures(folder):
                writer.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label})
    shards = sorted(str(path) for path in folder.glob("web-*.tar"))
    stored = webdataset.WebDataset(
        shards, shardshuffle=len(shards), nodesplitter=webdataset.split_by_node
    ).shuffle(1000)
    stored = (
        stored.decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform_of(case), int)
        .batched(case.batch_size)
    )
    return counted(
        webdataset.WebLoader(
            stored, batch_size=None, num_workers=NUM_WORKERS, persistent_workers=True
        )
    )


class _LitDecode:
    """Decodes a sample; at module level, because LitData pickles it for its processes."""

    def __init__(self, case: Case) -> None:
        self._transform = transform_of(case)

    def __call__(self, item: tuple[bytes, int]) -> tuple[Any, int]:
        return self._transform(decoded(item[0])), item[1]


class _LitSample:
    """Reads one image for LitData's writer."""

    def __call__(self, item: tuple[str, int]) -> tuple[bytes, int]:
        return Path(item[0]).read_bytes(), item[1]


def lit_data(case: Case, folder: Path) -> Any:
    import litdata

    stored = folder / "litdata"
    if not (stored / "index.json").exists():
        items = [(str(path), label) for path, label in pictures(folder)]
        litdata.optimize(
            _LitSample(), items, output_dir=str(stored), chunk_bytes="64MB", num_workers=1
        )
    images = litdata.StreamingDataset(str(stored), shuffle=True, transform=_LitDecode(case))
    return counted(
        litdata.StreamingDataLoader(
            images, batch_size=case.batch_size, num_workers=NUM_WORKERS, persistent_workers=True
        )
    )


def mosaic_streaming(case: Case, folder: Path) -> Any:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    stored = folder / "mds"
    shutil.rmtree(stored, ignore_errors=True)
    with MDSWriter(out=str(stored), columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in pictures(folder):
            writer.write({"image": path.read_bytes(), "label": label})
    transform = transform_of(case)

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return transform(decoded(sample["image"])), sample["label"]

    images = Images(local=str(stored), shuffle=True, batch_size=case.batch_size)
    return counted(
        DataLoader(images, case.batch_size, num_workers=NUM_WORKERS, persistent_workers=True)
    )


def dali(case: Case, folder: Path) -> Any:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    @pipeline_def(batch_size=case.batch_size, num_threads=NUM_WORKERS, device_id=None)
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(folder / "images"), random_shuffle=True, initial_fill=1024, name="files"
        )
        if case.padding_px:
            images = fn.decoders.image(files, device="cpu")
            starts = fn.random.uniform(
                values=list(range(-case.padding_px, case.padding_px + 1)),
                shape=2,
                dtype=types.INT32,
            )
            images = fn.slice(
                images, starts, [case.size_px] * 2, axes=(0, 1), out_of_bounds_policy="pad"
            )
        else:
            images = fn.decoders.image_random_crop(files, device="cpu", random_area=[0.08, 1.0])
            images = fn.resize(images, size=[case.size_px] * 2)
        flipped = fn.random.coin_flip()
        return fn.crop_mirror_normalize(
            images, mirror=flipped, dtype=types.FLOAT, std=[255.0] * 3
        ), labels

    built = pipeline()
    built.build()
    loader = DALIClassificationIterator(
        built, reader_name="files", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    return lambda: (len(batch[0]["data"]) for batch in loader)


def ffcv_loader(case: Case, folder: Path, write_mode: str, max_resolution: int) -> Any:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import (
        IntDecoder,
        RandomResizedCropRGBImageDecoder,
        SimpleRGBImageDecoder,
    )
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        RandomHorizontalFlip,
        RandomTranslate,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    path = str(folder / f"{write_mode}-{max_resolution}.beton")
    fields = {
        "image": RGBImageField(write_mode=write_mode, max_resolution=max_resolution),
        "label": IntField(),
    }
    if not Path(path).exists():
        DatasetWriter(path, fields, num_workers=NUM_WORKERS).from_indexed_dataset(
            ImageFolder(str(folder / "images"))
        )
    if case.padding_px:
        crop = [
            SimpleRGBImageDecoder(),
            RandomHorizontalFlip(),
            RandomTranslate(padding=case.padding_px),
        ]
    else:
        crop = [RandomResizedCropRGBImageDecoder((case.size_px,) * 2), RandomHorizontalFlip()]
    loader = Loader(
        path,
        batch_size=case.batch_size,
        num_workers=NUM_WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [*crop, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return counted(loader)


PEERS = {
    "ImageFolder": image_folder,
    "HF datasets, Parquet": hf_parquet,
    "WebDataset": web_dataset,
    "LitData": lit_data,
    "MosaicML Streaming": mosaic_streaming,
    "DALI on the CPU": dali,
    "FFCV jpeg": lambda case, folder: ffcv_loader(case, folder, "jpg", 400),
    "FFCV raw": lambda case, folder: ffcv_loader(case, folder, "raw", 400),
    "FFCV raw, at most 256 px": lambda case, folder: ffcv_loader(case, folder, "raw", 256),
}

if __name__ == "__main__":
    serve(lambda: PEERS[sys.argv[1]](CASES[sys.argv[2]], Path(sys.argv[3])))
