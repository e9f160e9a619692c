"""Images to features: torchvision's preprocessing, ResNet-18 in plain PyTorch, extraction with a cache that resumes.

    python features.py utzappos --data-root data    # leaves data/ut-zap50k/features.npz
    python features.py FOLDER --weights FILE --respect-orientation

The backbone is frozen, as in the paper: features are computed once and never trained.
Legend: N images, B images of a batch, F numbers a feature; crops are uint8 (height, width, 3).
"""

import argparse
import copy
import hashlib
import os
import sys
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn

import common
import data

WEIGHTS_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"  # the last 8 digits begin its SHA-256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images, by channel
SAVE_EVERY = 60  # seconds: how much of an extraction a kill may cost


def _rgb(image):
    """PIL's conversion, except that 16-bit greys (`I`, `I;16`), of which it makes white, keep their upper 8 bits."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _crop(image):
    """PIL image -> (224,224,3) uint8: short side to 256 (bilinear), centre 224 x 224, rounded as torchvision rounds."""
    image = _rgb(image)
    short, long = sorted(image.size)
    long = int(256 * long / short)
    image = image.resize((256, long) if image.width <= image.height else (long, 256), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    return np.array(image.crop((left, top, left + 224, top + 224)))


def _thumbnail(image):
    """PIL image -> (16,16,3) uint8, each pixel the mean colour of its area."""
    return np.array(_rgb(image).resize((16, 16), Image.Resampling.BOX))


def _normalise(crops):
    """(B,224,224,3) uint8 -> (B,3,224,224) float32, channels last in memory; torchvision's operations in its order."""
    batch = crops.permute(0, 3, 1, 2).float().div_(255)
    for channel, mean, std in zip(batch.unbind(1), MEAN, STD):  # plain numbers: a GPU need not wait for tensors of them
        channel.sub_(mean).div_(std)
    return batch


def preprocess(image):
    """PIL image -> (3,224,224) float32, what torchvision's Resize(256), CenterCrop(224), ToTensor, Normalize give.

    Any mode becomes RGB by PIL's `convert` (16-bit greys by their upper 8 bits). Orientation tags are ignored, as in
    published features: apply `PIL.ImageOps.exif_transpose` first if they should count.
    """
    return _normalise(torch.from_numpy(_crop(image))[None])[0].contiguous()


def pixels(image):
    """PIL image -> (768,) float32: its 16 x 16 RGB thumbnail, of mean 0 and deviation 1; the built-in dataset's feature."""
    return _standardise(torch.from_numpy(_thumbnail(image))[None])[0].numpy()


def _standardise(crops):
    """(B,16,16,3) uint8 -> (B,768) float32, each row of mean 0 and deviation 1 (of a plain image: zeros)."""
    rows = crops.flatten(1).float()
    return (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True, correction=0).clamp_min(1)


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a strided 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet18():
    """An untrained ResNet-18 (He et al., 2016) without its classifier: (N,3,224,224) -> (N,512) pooled features.

    Parameters have torchvision's names (`conv1.weight`, `layer2.0.downsample.0.weight`, ...).
    """
    def layer(inputs, outputs, stride=2):
        return nn.Sequential(_Block(inputs, outputs, stride), _Block(outputs, outputs, 1))

    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False), bn1=nn.BatchNorm2d(64), relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, 1), layer1=layer(64, 64, 1), layer2=layer(64, 128), layer3=layer(128, 256),
        layer4=layer(256, 512), avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))


def _weights_file(weights=None):
    """The file given, else where torch hub keeps the published one (it may not be there yet)."""
    if weights and not Path(weights).is_file():
        raise FileNotFoundError(f"no weights file {weights}: name one of ResNet-18's parameters, or none for torch hub's")
    return Path(weights or Path(torch.hub.get_dir(), "checkpoints", WEIGHTS_URL.rpartition("/")[2]))


def load_backbone(weights=None):
    """ResNet-18, frozen, with weights of a file, else of torch hub's cache, else of a download checked by its hash.

    The file is a state dict under torchvision's names; its classifier (`fc`) is dropped. Raises OSError if there is no
    such file or the download fails, ValueError if the file holds something else.
    """
    path = _weights_file(weights)
    if weights is None and not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(WEIGHTS_URL, path, WEIGHTS_URL[-12:-4], progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:  # RuntimeError: another hash
            raise OSError(f"cannot download ResNet-18's weights ({error}): fetch {WEIGHTS_URL} elsewhere and put it "
                          f"at {path}, or name the file by --weights FILE") from error
    state, model = data.load_tensors(path), resnet18()
    try:
        model.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")})
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"{path}: not the parameters of a ResNet-18 under torchvision's names "
                         f"({' '.join(str(error).split())[:300]})") from error
    return model.to(memory_format=torch.channels_last).requires_grad_(False).eval()


def pick_device(name="auto"):
    """The torch.device "auto" (the best there is), "cpu", "cuda", "cuda:1", "mps"; ValueError if it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in there if there[kind]))
    kind, _, number = str(name).partition(":")
    if kind not in there or number and not number.isdigit():
        raise ValueError(f"no such device: {name!r}; choose auto, cpu, cuda or mps")
    if not there[kind] or kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"PyTorch {torch.__version__} finds no device {name!r} on this machine; choose auto or cpu")
    return torch.device(name)


def _decode(path, crop, shrink, upright):
    """Write what `shrink` makes of one image file into an array; return why it cannot be read, or None."""
    try:
        with Image.open(path) as image:
            (short, long), limit = sorted(image.size), Image.MAX_IMAGE_PIXELS
            if limit and max(short, 256 * 256 / short) * long > limit:  # as it is, or with a short side of 256
                return f"a decompression bomb of {image.width:,} x {image.height:,} pixels?"
            crop[:] = shrink(ImageOps.exif_transpose(image) if upright else image)
    except FileNotFoundError:
        return "not there"
    except UnidentifiedImageError:
        return "not an image"
    except Exception as error:  # decoders of broken files raise all sorts
        return str(error) or repr(error)


def _cores():
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _behind(items, count):
    """The same items, each handed on when `count` later ones have been begun: so that their work overlaps."""
    begun = deque()
    for item in items:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


def _batches(files, backbone, device, batch_size, upright):
    """Of the images {name: path}, yield batch by batch {name: feature (F,) float32} and {name: why it cannot be read}.

    Threads decode a few batches ahead of the network (PIL releases the interpreter while it decodes and resizes), and
    features are fetched when the next batch is under way, so that a GPU need not wait for Python.
    """
    names, device, broken = list(files), pick_device(device), 0
    gpu = device.type == "cuda"
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}: expected 1 or more")
    shrink, shape, network = _crop, (224, 224, 3), lambda crops: backbone(_normalise(crops))
    if isinstance(backbone, nn.Module):
        backbone = copy.deepcopy(backbone).to(device).eval()  # the caller's stays where and as it is
    elif backbone == "pixels":
        shrink, shape, network = _thumbnail, (16, 16, 3), _standardise

    def decode(first):
        some = names[first:first + batch_size]
        crops = torch.empty((len(some), *shape), dtype=torch.uint8, pin_memory=gpu)
        return some, crops, [pool.submit(_decode, files[name], crop, shrink, upright)
                             for name, crop in zip(some, crops.numpy())]

    def launch(batch):
        some, crops, answers = batch
        bad = {name: why for name, answer in zip(some, answers) if (why := answer.result())}
        good = [name for name in some if name not in bad]
        crops = crops[[name not in bad for name in some]] if bad else crops
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            features = network(crops.to(device, non_blocking=gpu)).float() if good else torch.zeros(0, 0)
            features = features.to("cpu", non_blocking=gpu)
        return good, features, bad, torch.cuda.current_stream(device).record_event() if gpu else None

    workers = _cores()
    with ThreadPoolExecutor(workers) as pool, common.Progress("extracting", len(names), "images") as progress:
        decoded = _behind(map(decode, range(0, len(names), batch_size)), 2 + 2 * workers // batch_size)
        for good, features, bad, copied in _behind(map(launch, decoded), 1):
            if copied:
                copied.synchronize()
            if features.ndim != 2 or len(features) != len(good):
                raise ValueError(f"the backbone makes {tuple(features.shape)} of {len(good)} images, not (B, F)")
            yield dict(zip(good, features.numpy())), bad
            broken += len(bad)
            progress.update(len(good) + len(bad), note=f"{broken:,} cannot be read" if broken else "")


def _some(names, limit=20):
    """The first names, of a dict with what it says of each, and how many more there are."""
    first = [f"{name} ({names[name]})" if isinstance(names, dict) else str(name) for name in list(names)[:limit]]
    return ", ".join(first) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def _check(broken, total, skip, where=""):
    """ValueError naming the images {name: why} of `total` that have no features, unless they may be skipped."""
    if broken and (not skip or len(broken) == total):
        raise ValueError(f"{where}no features of {len(broken):,} of {total:,} images: {_some(broken)}; mend "
                         "them or leave them out, as --skip-broken does with those of a dataset")


def extract(paths, *, backbone=None, device="auto", batch_size=64, respect_orientation=False, skip_broken=False):
    """Image files, or one, -> (N,F) float32 features. Raises one ValueError that names all files that cannot be read.

    backbone: None, ResNet-18 with its published weights; a module or any callable, (B,3,224,224) float32 on the device,
    as `preprocess` makes them, -> (B,F); or "pixels". respect_orientation: turn photos upright first by their EXIF tag.
    skip_broken: rows of unreadable files are NaN. To train on features of your own backbone, save
    `np.savez(FILE, files=names, features=extract(paths, backbone=...))` and pass `--features FILE`.
    """
    paths, rows, broken = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths), {}, {}
    if not paths:
        raise ValueError("no images to extract features of: expected a list of one path or more")
    backbone = load_backbone() if backbone is None else backbone
    for good, bad in _batches(dict(enumerate(paths)), backbone, device, batch_size, respect_orientation):
        rows.update(good)
        broken.update(bad)
    _check({paths[row]: why for row, why in broken.items()}, len(paths), skip_broken)
    nan = np.full_like(next(iter(rows.values())), np.nan)
    return np.stack([rows.get(row, nan) for row in range(len(paths))])


def describe(weights, upright):
    """What cached features depend on, in words: backbone, weights (8 digits of their SHA-256), preprocessing."""
    path, digits = _weights_file(weights), WEIGHTS_URL[-12:-4]
    if weights is not None or path.exists():
        digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return f"ResNet-18 (weights {digits}), 224 of 256 pixels{', upright' if upright else ''}"


def _stamp(path):
    """Size and time of change of a file, by which a new version is noticed; None where there is no file."""
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None


def _cached(path, key, stamps):
    """{name: feature} of a cache, if it is there and has this key, without images that are gone or changed since."""
    stored = data.read_features(path) if path.exists() else {}
    if str(stored.get("key")) != key:
        return {}
    return {name: feature for name, feature, stamp in zip(stored["files"], stored["features"], stored["stamps"])
            if stamps.get(name) == tuple(stamp)}


def _refresh(dataset, names, *, weights, device, batch_size, upright, dtype):
    """Extract what a dataset's cache lacks, or has with another key or of an older image; go on where a kill left it.

    Returns {name: feature} and {name: why it cannot be read}.
    """
    cache, partial = dataset.folder / "features.npz", dataset.folder / "features.partial.npz"
    key, files = describe(weights, upright), {name: dataset.path(name) for name in names}
    stamps = {name: _stamp(path) for name, path in files.items()}
    rows, broken = _cached(cache, key, stamps) | _cached(partial, key, stamps), {}
    todo = {name: path for name, path in files.items() if name not in rows}
    if not todo:
        return rows, broken
    dtype = dtype or next((feature.dtype for feature in rows.values()), np.float32)

    def save():
        with common.writing(partial, "wb") as file:
            np.savez(file, files=list(rows), features=np.stack(list(rows.values())).astype(dtype), key=key,
                     stamps=[stamps[name] for name in rows])

    saved, known = time.monotonic(), len(rows)
    try:
        for good, bad in _batches(todo, load_backbone(weights), device, batch_size, upright):
            rows.update((name, feature.astype(dtype)) for name, feature in good.items())
            broken.update(bad)
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()
    finally:  # of an interrupted extraction too
        if len(rows) > known:
            save()
    if len(rows) > known:
        os.replace(partial, cache)
    return rows, broken


def load_features(dataset, *, file=None, weights=None, device="auto", batch_size=64, respect_orientation=False,
                  skip_broken=False, dtype=None):
    """Features of a dataset's images: (dataset, {phase: (N,F) float32}, what they are, for people).

    From `file` (.npz with `files` and `features` in any order, or the same by torch.save), else from features.npz or
    resnet18_featurers.t7 in the folder, else extracted with ResNet-18 and `weights` (see `load_backbone`) and cached in
    features.npz as `dtype` (float32, the default, or float16). Such a cache is brought up to date when images were
    added, changed or removed, or when weights or preprocessing are others; any other features.npz is taken as it is.
    skip_broken: the dataset comes back without the images that have no features; otherwise ValueError names them all.
    """
    names = list(dict.fromkeys(name for images in dataset.images.values() for name in images))
    found = [path for name in ("features.npz", "resnet18_featurers.t7") if (path := dataset.folder / name).exists()]
    source = file or next(iter(found), None)
    stored = data.read_features(source) if source else {}
    ours = not source or file is None and "stamps" in stored
    if ours and not any(dataset.path(name).exists() for name in names):
        ours = False  # a cache that travelled without its images is taken as it is
        if not source:
            raise FileNotFoundError(f"{dataset.folder}: no features.npz, and in images/ none of {len(names):,} images; "
                                    "put them there, or give --features FILE")
    if ours:
        rows, broken = _refresh(dataset, names, weights=weights, device=device, batch_size=batch_size,
                                upright=respect_orientation, dtype=dtype)
        about, where = describe(weights, respect_orientation), ""
    else:
        rows, about = dict(zip(stored["files"], stored["features"])), stored.get("key", f"features in {source}")
        broken = {name: "not there" for name in names if name not in rows}
        where = f"{source} (of {_some(stored['files'], 2)}): "
    _check(broken, len(names), skip_broken, where)
    dataset = _without(dataset, broken) if broken else dataset
    wrong = [name for name in names if name in rows and not np.isfinite(rows[name]).all()]
    if wrong:
        raise ValueError(f"{where}features of {len(wrong):,} images are not finite: {_some(wrong)}")
    width = len(next(iter(rows.values()), ()))
    features = {phase: np.array([rows[name] for name in images], np.float32).reshape(len(images), width)
                for phase, images in dataset.images.items()}
    return dataset, features, f"{about}, frozen"


def _without(dataset, names):
    """The dataset without these images, and with a note of it."""
    stays = {phase: np.array([name not in names for name in images], bool) for phase, images in dataset.images.items()}
    return dataset._replace(
        images={phase: [name for name in images if name not in names] for phase, images in dataset.images.items()},
        targets={phase: targets[stays[phase]] for phase, targets in dataset.targets.items()},
        notes=[*dataset.notes, f"{len(names):,} images left out: {_some(names)}"])


@common.command
def main(argv=None):
    """Extract and cache the features of a dataset's images."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dataset", help="a name (utzappos, mitstates, cgqa) or a folder")
    parser.add_argument("--data-root", default="data", help="where named datasets lie (default: data)")
    parser.add_argument("--weights", help="ResNet-18's parameters (default: torch hub's cache, else a download)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time (default: 64)")
    parser.add_argument("--respect-orientation", action="store_true", help="turn photos upright by their EXIF tag")
    parser.add_argument("--skip-broken", action="store_true", help="go on without images that cannot be read")
    parser.add_argument("--half", action="store_true", help="cache as float16, half the space")
    options = parser.parse_args(argv)
    given = data.load(options.dataset, options.data_root)
    dataset, features, about = load_features(
        given, weights=options.weights, device=options.device, batch_size=options.batch_size,
        respect_orientation=options.respect_orientation, skip_broken=options.skip_broken,
        dtype=np.float16 if options.half else None)
    shapes = ", ".join(f"{phase} {block.shape}" for phase, block in features.items())
    print(*dataset.notes[len(given.notes):], f"{dataset.folder}: {shapes}; {about}", sep="\n")


if __name__ == "__main__":
    main()
