"""Images to features: torchvision's preprocessing, ResNet-18 in plain PyTorch, a resuming cache.

    python features.py utzappos --data-root data    # leaves data/ut-zap50k/features.npz
    python features.py FOLDER --weights FILE --respect-orientation
    torchrun --standalone --nproc-per-node 2 features.py FOLDER    # each process takes its share

The backbone is frozen, as in the paper: features are computed once and never trained.
Legend: N images, B images of a batch, F numbers a feature; crops are uint8 (height, width, 3).
"""

import argparse
import copy
import glob
import hashlib
import os
import re
import time
import zlib
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import common

if __name__ == "__main__":
    common.wait_gently()  # before torch is imported

import numpy as np
import torch
from PIL import Image
from torch import nn

import data
import download

# The last 8 digits begin the file's SHA-256.
WEIGHTS_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
WEIGHTS_DIGITS = 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images, by channel
SAVE_EVERY = 60  # seconds: how much of an extraction a kill may cost
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
# Orientation -> what turns a photo upright. PIL.ImageOps.exif_transpose does the same, but also
# rewrites the tags, and fails where some of them are damaged.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
NESTED = "state_dict", "model_state_dict", "model", "net"  # where training loops put parameters


# ---- preprocessing -------------------------------------------------------------------------------


def _crop(image):
    """PIL image -> (224,224,3) uint8: short side to 256 (bilinear), centre 224 x 224.

    Rounded as torchvision rounds.
    """
    image = data.rgb(image)
    short, long = sorted(image.size)
    long = int(256 * long / short)
    if image.width <= image.height:
        size = (256, long)
    else:
        size = (long, 256)
    image = image.resize(size, Image.Resampling.BILINEAR)
    left = round((image.width - 224) / 2)
    top = round((image.height - 224) / 2)
    return np.array(image.crop((left, top, left + 224, top + 224)))


def _thumbnail(image):
    """PIL image -> (16,16,3) uint8, each pixel the mean colour of its area."""
    return np.array(data.rgb(image).resize((16, 16), Image.Resampling.BOX))


def _normalise(crops):
    """(B,224,224,3) uint8 -> (B,3,224,224) float32, channels last in memory.

    torchvision's operations in its order.
    """
    batch = crops.permute(0, 3, 1, 2).float().div_(255)
    for channel, mean, std in zip(batch.unbind(1), MEAN, STD):
        channel.sub_(mean).div_(std)  # plain numbers: a GPU need not wait for tensors of them
    return batch


def preprocess(image):
    """PIL image -> (3,224,224) float32: torchvision's Resize(256), CenterCrop(224), Normalize.

    Any mode becomes RGB by PIL's `convert` (16-bit greys by their upper 8 bits, floats in [0, 1]
    times 255). Orientation tags are ignored, as in published features: apply
    `PIL.ImageOps.exif_transpose` first if they should count.
    """
    return _normalise(torch.from_numpy(_crop(image))[None])[0].contiguous()


def pixels(image):
    """PIL image -> (768,) float32: its 16 x 16 RGB thumbnail, of mean 0 and deviation 1.

    The feature of the built-in dataset.
    """
    return _standardise(torch.from_numpy(_thumbnail(image))[None])[0].numpy()


def _standardise(crops):
    """(B,16,16,3) uint8 -> (B,768) float32, each row of mean 0, deviation 1 (plain images: 0)."""
    rows = crops.flatten(1).float()
    centred = rows - rows.mean(1, keepdim=True)
    return centred / rows.std(1, keepdim=True, correction=0).clamp_min(1)


# ---- ResNet-18 -----------------------------------------------------------------------------------


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: a strided 1 x 1 one where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        return self.relu(y + x)


def resnet18():
    """An untrained ResNet-18 (He et al., 2016) without its classifier: (N,3,224,224) -> (N,512).

    Parameters have torchvision's names (`conv1.weight`, `layer2.0.downsample.0.weight`, ...).
    """
    def layer(inputs, outputs, stride=2):
        return nn.Sequential(_Block(inputs, outputs, stride), _Block(outputs, outputs, 1))

    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, 1),
        layer1=layer(64, 64, 1),
        layer2=layer(64, 128),
        layer3=layer(128, 256),
        layer4=layer(256, 512),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten()))


def _weights_digits():
    """The first digits of the published file's SHA-256, from its name."""
    return Path(WEIGHTS_URL).stem[-WEIGHTS_DIGITS:]


def _digits_of(path):
    """The first digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:WEIGHTS_DIGITS]


def _weights_file(weights=None):
    """The file given, else where torch hub keeps the published one (it may not be there yet)."""
    if not weights:
        return Path(torch.hub.get_dir(), "checkpoints", WEIGHTS_URL.rpartition("/")[2])
    if not Path(weights).is_file():
        raise FileNotFoundError(f"no weights file {weights}: name one of ResNet-18's parameters, "
                                "or none for torch hub's")
    return Path(weights)


def unwrap(stored):
    """The dict of parameters in what a training loop saved.

    It may be nested under `state_dict`, `model_state_dict`, `model` or `net`, and its names may
    begin with `module.` (data parallel) or `backbone.` (then other parts, a head, are left out).
    ValueError: it is no dict of parameters.

    >>> unwrap({"epoch": 3, "net": {"module.conv1.weight": 0}})
    {'conv1.weight': 0}
    >>> unwrap({"backbone.bn1.bias": 1, "head.bias": 2})
    {'bn1.bias': 1}
    """
    if torch.is_tensor(stored):
        raise ValueError(f"one tensor {tuple(stored.shape)}, expected a dict of parameters by name")
    if not isinstance(stored, dict):
        raise ValueError(f"a {type(stored).__name__}, expected a dict of parameters by name")
    for name in NESTED:
        if isinstance(stored.get(name), dict):
            return unwrap(stored[name])
    names = [name for name in stored if isinstance(name, str)]
    if names and all(name.startswith("module.") for name in names):
        return unwrap({name.removeprefix("module."): stored[name] for name in names})
    inside = [name for name in names if name.startswith("backbone.")]
    if inside:
        return unwrap({name.removeprefix("backbone."): stored[name] for name in inside})
    return stored


def load_backbone(weights=None):
    """ResNet-18, frozen, with weights of a file, else of torch hub's cache, else of a download.

    The download is checked by its hash. The file is a state dict under torchvision's names, plain
    or as `unwrap` reads it; its classifier (`fc`) is dropped. Raises OSError if there is no such
    file or the download fails, ValueError if the file holds something else.
    """
    path = _weights_file(weights)
    if weights is None and not path.exists():
        _download_weights(path)
    stored = data.load_tensors(path)
    model = resnet18()
    try:
        parameters = unwrap(stored)
        parameters = {name: value for name, value in parameters.items()
                      if not str(name).startswith("fc.")}
        model.load_state_dict(parameters)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the parameters of a ResNet-18 under torchvision's names "
                         f"({' '.join(str(error).split())[:300]})") from error
    return model.to(memory_format=torch.channels_last).requires_grad_(False).eval()


def _download_weights(path):
    """Fetch the published weights; OSError says where else to get them and where to put them."""
    unchecked = path.with_name(f"{path.name}.unchecked")
    try:
        download.fetch(WEIGHTS_URL, unchecked, starts=data.SAVED_STARTS, tries=2)
        digits = _digits_of(unchecked)
        if digits != _weights_digits():
            unchecked.unlink()
            raise ValueError(f"its hash begins {digits}, expected {_weights_digits()}")
        os.replace(unchecked, path)
    except (OSError, ValueError) as error:
        raise OSError(f"cannot download ResNet-18's weights ({error}): fetch {WEIGHTS_URL} "
                      f"elsewhere and put it at {path}, or name the file by --weights FILE; "
                      "training needs no weights with --features FILE") from error


def pick_device(name="auto"):
    """The torch.device of "auto" (the best there is), "cpu", "cuda", "cuda:1", "mps".

    Under torchrun "auto" and "cuda" are the process's own GPU. ValueError: it is not there.
    """
    there = {"cuda": torch.cuda.is_available(),
             "mps": torch.backends.mps.is_available(),
             "cpu": True}
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    kind, _, number = str(name).partition(":")
    if kind not in there or number and not number.isdigit():
        raise ValueError(f"no such device: {name!r}; choose auto, cpu, cuda or mps")
    if not there[kind] or kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"PyTorch {torch.__version__} finds no device {name!r} on this machine; "
                         "choose auto or cpu")
    if kind == "cuda" and not number and "LOCAL_RANK" in os.environ:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(own)  # of streams, graphs and messages between processes, too
        return own
    return torch.device(name)


# ---- reading images ------------------------------------------------------------------------------


class _Photo(NamedTuple):
    """What reading an image file told."""

    problem: str | None     # why it cannot be read
    digest: str = ""        # equal for files of equal bytes
    is_turned: bool = False  # an orientation tag says that it is not stored upright
    pixels: torch.Tensor | None = None  # of own preprocessing; ours goes into the batch at once


def _orientation(image):
    """An image's EXIF tag of orientation; 1, upright, where there is none that can be read."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # of damaged tags all sorts; the picture beside them may be whole
        return 1


def _decode(path, shrink, upright, limit=None, row=None):
    """Read an image file, and let `shrink` make pixels of the PIL image: _Photo.

    row: an array that takes the pixels; None: _Photo has them.
    limit: the most pixels of an image as it is, or with its short side brought to 256.
    """
    found = {}

    def read(image, content):
        found["digest"] = hashlib.blake2b(content, digest_size=8).hexdigest()
        orientation = _orientation(image)
        found["is_turned"] = orientation in TURNS
        if upright and orientation in TURNS:
            image = image.transpose(TURNS[orientation])
        pixels = shrink(image)
        if row is None:
            found["pixels"] = pixels
        else:
            row[:] = pixels

    problem = data.no_photo(path, read, limit)
    return _Photo(problem, **found)


# ---- extraction ----------------------------------------------------------------------------------


def _recipe(backbone, own_preprocess, device):
    """How images become features: (PIL image -> pixels, their shape, batch of pixels -> (B, F)).

    Pixels are arrays of uint8, or the tensors of own_preprocess, of a shape that it alone knows:
    None. backbone: a module, which stays where and as it is, any callable, or "pixels".
    """
    if isinstance(backbone, nn.Module):
        backbone = copy.deepcopy(backbone).to(device).eval()
    if own_preprocess is not None:

        def shrink(image):
            tensor = own_preprocess(data.rgb(image))
            if not torch.is_tensor(tensor):
                raise ValueError(f"preprocess makes a {type(tensor).__name__}, expected a tensor")
            return tensor

        return shrink, None, backbone
    if isinstance(backbone, str):
        if backbone != "pixels":
            raise ValueError(f"backbone {backbone!r}: expected a module, a callable or 'pixels'")
        return _thumbnail, (16, 16, 3), _standardise
    return _crop, (224, 224, 3), lambda crops: backbone(_normalise(crops))


def _stack(tensors):
    """Tensors of one shape as one tensor (B, ...)."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError("preprocess makes tensors of several shapes, expected one: "
                         f"{data.some(sorted(shapes))}")
    return torch.stack(tensors)


def _cores():
    """How many processor cores this process may use: its share, where torchrun started several."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _behind(items, count):
    """The same items, each handed on when `count` later ones have been begun: their work overlaps.
    """
    begun = deque()
    for item in items:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


def _launch(network, device, names, batch, answers):
    """Wait for the decoding of a batch (B, ...) and start the network on it. Without a batch, the
    photos have their pixels.

    Returns {name: _Photo}, the features (G, F) of the G images that could be read, on the CPU once
    an event of CUDA has happened, and that event or None.
    """
    photos = {name: answer.result() for name, answer in zip(names, answers)}
    good = [name for name in names if photos[name].problem is None]
    if not good:
        return photos, torch.zeros(0, 0), None
    gpu = device.type == "cuda"
    if batch is None:
        batch = _stack([photos[name].pixels for name in good])
    elif len(good) < len(names):
        batch = batch[[photos[name].problem is None for name in names]]
    # The same numbers each time, and those of the CPU as far as possible.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with torch.inference_mode(), exact:
        features = network(batch.to(device, non_blocking=gpu))
        if not torch.is_tensor(features) or features.ndim != 2 or len(features) != len(good):
            shape = tuple(features.shape) if torch.is_tensor(features) else type(features).__name__
            raise ValueError(f"the backbone makes {shape} of {data.count(len(good), 'image')}, "
                             "not (B, F)")
        features = features.float().to("cpu", non_blocking=gpu)
    copied = torch.cuda.current_stream(device).record_event() if gpu else None
    return photos, features, copied


def _batches(files, backbone, device, batch_size, upright, limit=None, own_preprocess=None,
             progress=None, count_broken=None):
    """Of images {name: path}, yield batch by batch {name: feature (F,) float32}, {name: _Photo}.

    progress, count_broken (of `common.tally`): of all processes; by default of these images alone.
    Threads decode a few batches ahead of the network (PIL releases the interpreter while it
    decodes and resizes), and features are fetched when the next batch is under way, so that a GPU
    need not wait for Python.
    """
    if batch_size < 1:
        raise ValueError(f"batch size {batch_size}: expected 1 or more")
    data.register_plugins()
    device = pick_device(device)
    shrink, shape, network = _recipe(backbone, own_preprocess, device)
    names = list(files)
    if progress is None:
        progress = common.Progress("extracting", len(names), "images")
        count_broken = common.tally(together=False)
    workers = min(_cores(), data.DECODERS)
    pool = ThreadPoolExecutor(workers)

    def begin(first):
        chosen = names[first:first + batch_size]
        batch = None
        rows = [None] * len(chosen)
        if shape is not None:
            # Each thread fills its row: to put them together afterwards would make a GPU wait.
            batch = torch.empty((len(chosen), *shape), dtype=torch.uint8,
                                pin_memory=device.type == "cuda")
            rows = batch.numpy()
        answers = []
        for name, row in zip(chosen, rows):
            answers.append(pool.submit(_decode, files[name], shrink, upright, limit, row))
        return chosen, batch, answers

    decoded = _behind(map(begin, range(0, len(names), batch_size)), 2 + 2 * workers // batch_size)
    launched = _behind((_launch(network, device, *batch) for batch in decoded), 1)
    try:
        with progress:
            for photos, features, copied in launched:
                if copied:
                    copied.synchronize()
                good = [name for name, photo in photos.items() if photo.problem is None]
                yield dict(zip(good, features.numpy())), photos
                broken = count_broken(len(photos) - len(good))
                progress.update(len(photos), _note(broken))
    finally:
        pool.shutdown(cancel_futures=True)


def _note(broken):
    """What stands beside the progress."""
    return f"{broken:,} cannot be read" if broken else ""


def _check(broken, total, skip, where=""):
    """ValueError naming the images {name: why} of `total` without features, unless skipped."""
    if broken and (not skip or len(broken) == total):
        raise ValueError(f"{where}no features of {len(broken):,} of "
                         f"{data.count(total, 'image')}: {data.some_with_reasons(broken, 20)}; "
                         "mend them, or leave them out by --skip-broken")


def extract(paths, *, backbone=None, device="auto", batch_size=64, respect_orientation=False,
            skip_broken=False, preprocess=None, max_pixels=None):
    """Image files, or one, -> (N,F) float32 features.

    backbone: None, ResNet-18 with its published weights; a module or any callable, (B,3,224,224)
    float32 on the device, as `preprocess` makes them, -> (B,F); or "pixels".
    preprocess: any function from a PIL image (RGB) to a tensor, as torchvision, timm and open_clip
    hand out; the backbone then gets a batch of these.
    respect_orientation: turn photos upright first by their EXIF tag.
    skip_broken: rows of unreadable files are NaN; otherwise one ValueError names them all.
    max_pixels: the largest photo that is read (default 179 million pixels).

    To train on features of your own backbone, save
    `np.savez(FILE, files=names, features=extract(paths, backbone=...))` and pass `--features FILE`.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    paths = list(paths)
    if not paths:
        raise ValueError("no images to extract features of: expected a list of one path or more")
    if backbone is None:
        backbone = load_backbone()
    rows = {}
    broken = {}
    with data.pixel_limit(max_pixels) as limit:
        for features, photos in _batches(dict(enumerate(paths)), backbone, device, batch_size,
                                         respect_orientation, limit, preprocess):
            rows.update(features)
            for row, photo in photos.items():
                if photo.problem is not None:
                    broken[paths[row]] = photo.problem
    _check(broken, len(paths), skip_broken)
    nan = np.full_like(next(iter(rows.values())), np.nan)
    return np.stack([rows.get(row, nan) for row in range(len(paths))])


# ---- the cache -----------------------------------------------------------------------------------


def describe(weights, upright):
    """What cached features depend on, in words: backbone, weights, preprocessing.

    The weights by 8 digits of their SHA-256.
    """
    path = _weights_file(weights)
    digits = _weights_digits()
    if weights is not None or path.exists():
        digits = _digits_of(path)
    turned = ", upright" if upright else ""
    return f"ResNet-18 (weights {digits}), 224 of 256 pixels{turned}"


class _Row(NamedTuple):
    """What a cache holds of an image."""

    feature: np.ndarray     # (F,)
    stamp: tuple            # size and time of change of the file, by which a new one is noticed
    is_turned: bool         # its orientation tag says that it is not stored upright
    digest: str             # equal for files of equal bytes; empty in caches of earlier versions


class _Cache(NamedTuple):
    """What a file of cached features holds."""

    path: Path
    key: str                # of `describe`
    weights: str            # the file that was named by --weights, or ""
    rows: dict[str, _Row]


def _read_cache(path):
    """The cache in a file: _Cache. ValueError names a damaged file."""
    try:
        stored = data.read_features(path)
    except ValueError as error:
        raise ValueError(f"{error}; a cache may be removed, it is then made again") from error
    count = len(stored["files"])
    turned = stored.get("turned", np.zeros(count, bool)).tolist()
    digests = stored.get("digests", np.full(count, "")).tolist()
    stamps = [tuple(stamp) for stamp in np.asarray(stored["stamps"]).tolist()]
    rows = {}
    for name, *row in zip(stored["files"], stored["features"], stamps, turned, digests):
        rows[name] = _Row(*row)
    return _Cache(path, str(stored.get("key")), str(stored.get("weights", "")), rows)


def _write_cache(cache):
    """Write a file of cached features, whole or not at all."""
    rows = cache.rows.values()
    features = np.stack([row.feature for row in rows])
    with common.writing(cache.path, "wb") as file:
        np.savez(file, files=list(cache.rows), features=features, key=cache.key,
                 weights=cache.weights, stamps=[row.stamp for row in rows],
                 turned=[row.is_turned for row in rows], digests=[row.digest for row in rows])


def _partial(path, rank):
    """Where a process keeps what it has of an unfinished extraction."""
    number = f"-{rank}" if rank > 0 else ""
    return path.with_name(f"{path.stem}.partial{number}.npz")


def _partials(path):
    """The files that unfinished extractions left beside a cache."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.partial*.npz"))


def _cache_places(dataset, cache, fallback):
    """Where a dataset's cache may lie, the preferred place first."""
    places = [dataset.folder / "features.npz"]
    if fallback is not None:
        places.append(Path(fallback, f"{dataset.name}-features.npz"))
    if cache is not None:
        places.insert(0, Path(cache, f"{dataset.name}-features.npz"))
    return places


def _writable_place(dataset, cache, fallback):
    """(where the cache is to be written, a note if that was not asked for), found by trying.

    OSError: nowhere.
    """
    places = _cache_places(dataset, cache, fallback)
    if cache is not None:
        places = places[:1]
    for place in places:
        try:
            common.check_writable(place.parent, "--cache DIR")
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = error
            continue
        if place == places[0]:
            return place, []
        return place, [f"{dataset.folder} cannot be written: features are cached in {place}"]
    raise problem


def _rows_of(caches, key, stamps):
    """{name: _Row} of the caches with this key, without images that are gone or changed since."""
    rows = {}
    for cache in caches:
        if cache.key != key:
            continue
        for name, row in cache.rows.items():
            if stamps.get(name) == row.stamp:
                rows[name] = row
    return rows


def _without_weights(key):
    """A key without the digits of its weights."""
    return re.sub(r"weights \w+", "weights", key)


def _choose_weights(weights, upright, caches, stamps):
    """(weights file or None, key, {name: _Row} of that key): whose features to use.

    With no weights named, those of any weights' cache are good, if it is whole or its weights
    file is still there.
    """
    if weights is not None:
        key = describe(weights, upright)
        return weights, key, _rows_of(caches, key, stamps)
    own_key = describe(None, upright)
    for cache in caches:
        if _without_weights(cache.key) != _without_weights(own_key):
            continue
        rows = _rows_of(caches, cache.key, stamps)
        if all(name in rows for name in stamps):
            return None, cache.key, rows
        if cache.weights and Path(cache.weights).is_file():
            if describe(cache.weights, upright) == cache.key:
                return Path(cache.weights), cache.key, rows
    return None, own_key, _rows_of(caches, own_key, stamps)


def _refresh(dataset, names, *, weights, device, batch_size, upright, cache, fallback, max_pixels):
    """Extract what a dataset's caches lack, or have with another key or of an older image.

    Goes on where a kill left it. Returns {name: _Row}, {name: why it cannot be read}, the key,
    and notes.
    """
    files = {name: dataset.path(name) for name in names}
    stamps = {name: data.stamp(path) for name, path in files.items()}
    rank = common.rank()
    caches = _found_caches(dataset, cache, fallback)
    weights, key, rows = _choose_weights(weights, upright, caches, stamps)
    todo = [name for name in names if name not in rows]
    _check_shared(dataset, todo)
    if not todo and not any(".partial" in part.path.name for part in caches):
        return rows, {}, key, []

    path, notes = _writable_place(dataset, cache, fallback)
    whole = _Cache(path, key, str(Path(weights).resolve()) if weights else "", rows)
    common.check_shared(path.parent)
    share = {name: files[name] for name in todo[rank::common.processes()]}
    # Each process keeps what all knew before, too: its file may replace the only one that had it.
    mine = whole._replace(path=_partial(path, rank), rows=dict(rows))
    broken = {}
    if todo:
        backbone = _load_in_turn(weights)
        progress = common.Progress("extracting", len(todo), "images", together=True)
        count_broken = common.tally()
        with data.pixel_limit(max_pixels) as limit:
            batches = _batches(share, backbone, device, batch_size, upright, limit,
                               progress=progress, count_broken=count_broken)
            broken = _fill(mine, batches, stamps)
        common.show_until(progress, progress.add, len(todo), lambda: _note(count_broken(0)))
    for others in common.gather(broken):
        broken = broken | others
    if rank == 0:
        parts = [_read_cache(part) for part in _partials(path)]
        rows = rows | _rows_of(parts, key, stamps) | mine.rows
        if rows:
            _write_cache(whole._replace(rows=rows))
        for part in _partials(path):
            part.unlink(missing_ok=True)
    common.gather("the cache is whole")
    if rank > 0 and path.exists():
        rows = _rows_of([_read_cache(path)], key, stamps)
    return rows, broken, key, notes


def _found_caches(dataset, cache, fallback):
    """The caches, whole or in part, that lie where a dataset's may be."""
    caches = []
    for place in dict.fromkeys(_cache_places(dataset, cache, fallback)):
        if data.is_cache(place):
            caches.append(_read_cache(place))
        caches += [_read_cache(part) for part in _partials(place)]
    return caches


def _load_in_turn(weights):
    """`load_backbone`; of several processes the first one alone downloads the weights."""
    if common.rank() > 0:
        common.gather("the weights are there")
    backbone = load_backbone(weights)
    if common.rank() == 0:
        common.gather("the weights are there")
    return backbone


def _fill(cache, batches, stamps):
    """Add what batches bring to the cache's rows, saving it now and then and whatever happens.

    Returns {name: why it cannot be read}.
    """
    broken = {}
    known = len(cache.rows)
    saved = time.monotonic()
    try:
        for features, photos in batches:
            for name, photo in photos.items():
                if photo.problem is not None:
                    broken[name] = photo.problem
                    continue
                cache.rows[name] = _Row(features[name], stamps[name], photo.is_turned, photo.digest)
            if time.monotonic() - saved > SAVE_EVERY and len(cache.rows) > known:
                _write_cache(cache)
                saved = time.monotonic()
    finally:  # of an interrupted extraction too
        if len(cache.rows) > known:
            with common.signals_held():
                _write_cache(cache)
    return broken


def _check_shared(dataset, todo):
    """OSError unless all processes see the same images and caches."""
    sums = common.gather((len(todo), zlib.crc32("\n".join(todo).encode())))
    if len(set(sums)) > 1:
        counts = [f"{count:,}" for count, _ in sums]
        raise OSError(f"{dataset.folder}: the processes lack features of {', '.join(counts)} "
                      "images, by rank; expected the same ones: data and cache need a folder that "
                      "all of them share")


# ---- features of a dataset -----------------------------------------------------------------------


def load_features(dataset, *, file=None, weights=None, device="auto", batch_size=64,
                  respect_orientation=False, skip_broken=False, cache=None, fallback=None,
                  max_pixels=None):
    """Features of a dataset's images: (dataset, {phase: (N,F) float32}, what they are, for people).

    From `file` (.npz with `files` and `features` in any order, or the same by torch.save), else
    from features.npz or resnet18_featurers.t7 in the folder, else extracted with ResNet-18 and
    `weights` (see `load_backbone`) and cached in features.npz. Such a cache is brought up to date
    when images were added, changed or removed, or when weights or preprocessing are others; any
    other features.npz is taken as it is.

    cache: another folder for the cache. fallback: the folder for it if the dataset's cannot be
    written, which a note says; without it that is an OSError, before the extraction.
    skip_broken: the dataset comes back without the images that have no features; otherwise
    ValueError names them all. max_pixels: the largest photo that is read, 179 million pixels.
    What was odd (sideways photos, files in two sets, features of zeros) is added to the notes.
    Under torchrun all processes call this; each extracts its share.
    """
    if weights:
        _weights_file(weights)  # says if there is none
    names = dataset.every_image
    source = _finished_source(dataset, names, file, cache, fallback)
    notes = []
    where = ""
    if source is None:
        rows, broken, about, notes = _refresh(
            dataset, names, weights=weights, device=device, batch_size=batch_size,
            upright=respect_orientation, cache=cache, fallback=fallback, max_pixels=max_pixels)
        features_of = {name: row.feature for name, row in rows.items()}
    else:
        stored = data.read_features(source, names)
        features_of = dict(zip(stored["files"], stored["features"]))
        about = stored.get("key", f"features in {source}")
        if weights:
            notes.append(f"the features are those in {source}, so that --weights changes nothing")
        broken = {name: "not there" for name in names if name not in features_of}
        where = f"{source} (of {data.some(stored['files'], 2)}): "
    _check(broken, len(names), skip_broken, where)
    if broken:
        dataset = _without(dataset, broken)
    if source is None:
        notes += _photo_notes(dataset, rows, respect_orientation)
    features = {phase: _table(images, features_of) for phase, images in dataset.images.items()}
    notes += _check_numbers(dataset, features, where)
    if notes:
        dataset = dataset._replace(notes=[*dataset.notes, *notes])
    return dataset, features, f"{about}, frozen"


def _finished_source(dataset, names, file, cache, fallback):
    """The file whose features are taken as they are; None: they are extracted from the images.

    FileNotFoundError: there are neither features nor images.
    """
    if file is not None:
        return file
    found = data.feature_files(dataset.folder)
    found += [place for place in _cache_places(dataset, cache, fallback) if place.exists()]
    if found and not data.is_cache(found[0]):
        return found[0]
    if any(dataset.path(name).exists() for name in names):
        return None
    if found:  # a cache that travelled without its images
        return found[0]
    raise FileNotFoundError(f"{dataset.folder}: no features.npz, and none of "
                            f"{data.count(len(names), 'image')} there or in images/; put them "
                            "there, or give --features FILE")


def lacking(dataset, *, file=None, weights=None, cache=None, fallback=None, skip_broken=False):
    """What `load_features` would not find, and what it would fetch: two lists of texts."""
    names = dataset.every_image
    obstacles = []
    source = None
    if file is not None and not Path(file).exists():
        return [f"no file of features {file}"], []
    try:
        source = _finished_source(dataset, names, file, cache, fallback)
        if source is None and not skip_broken:
            there = {name for name in names if dataset.path(name).exists()}
            where = f"found neither in {dataset.folder}/images/ nor in {dataset.folder}/"
            obstacles += data.missing(names, there, where)
    except FileNotFoundError as error:
        obstacles.append(str(error))
    is_begun = any(place.exists() for place in _cache_places(dataset, cache, fallback))
    if source is not None or (is_begun and weights is None):
        return obstacles, []
    try:
        path = _weights_file(weights)
    except FileNotFoundError as error:
        return [*obstacles, str(error)], []
    if path.exists():
        return obstacles, []
    return obstacles, [f"ResNet-18's weights, which are not at {path}, will be fetched from "
                       f"{WEIGHTS_URL} unless --weights FILE names them; --features FILE does "
                       "without"]


def weights_behind(dataset, about, *, cache=None, fallback=None):
    """The weights file that was named when the cache with these features was made, else None.

    about: what `load_features` says of them; cache, fallback: as there.
    """
    for place in _cache_places(dataset, cache, fallback):
        if not data.is_cache(place):
            continue
        with np.load(place, allow_pickle=False) as stored:
            key = str(stored["key"])
            weights = str(stored["weights"]) if "weights" in stored else ""
        if weights and about.startswith(key):
            return weights
    return None


def _table(images, features_of):
    """Features of N images, {name: (F,)}, as (N, F) float32."""
    width = len(next(iter(features_of.values()), ()))
    with np.errstate(over="ignore"):  # what is too large is then not finite
        table = np.array([features_of[name] for name in images], np.float32)
    return table.reshape(len(images), width)


def _check_numbers(dataset, features, where):
    """Notes on features of zeros alone; ValueError: features that are not finite."""
    wrong = {}  # dicts as sets that keep the order
    zero = {}
    for phase, images in dataset.images.items():
        is_zero = ~features[phase].any(1)
        wrong.update(dict.fromkeys(data.not_finite(images, features[phase])))
        zero.update(dict.fromkeys(images[row] for row in np.flatnonzero(is_zero)))
    if wrong:
        where = where or f"{dataset.folder}: "
        raise ValueError(f"{where}features of {data.count(len(wrong), 'image')} are not "
                         f"finite: {data.some(wrong, 20)}")
    if zero:
        return [f"{data.count(len(zero), 'image')} with features of zeros alone, which tell "
                f"nothing: {data.some(zero)}"]
    return []


def _without(dataset, names):
    """The dataset without these images {name: why}, and with a note of it."""
    images = {}
    targets = {}
    for phase, every in dataset.images.items():
        stays = np.array([name not in names for name in every], bool)
        images[phase] = [name for name in every if name not in names]
        targets[phase] = dataset.targets[phase][stays]
    note = f"{data.count(len(names), 'image')} left out: {data.some_with_reasons(names, 20)}"
    return dataset._replace(images=images, targets=targets, notes=[*dataset.notes, note])


def _photo_notes(dataset, rows, upright):
    """Notes on photos that lie on their side, and on equal files in two sets."""
    notes = []
    turned = [name for name, row in rows.items() if row.is_turned]
    if turned and not upright:
        notes.append(f"{data.count(len(turned), 'image')} with an orientation that is ignored "
                     f"({data.some(turned)}): --respect-orientation turns them upright")
    for earlier, later in (("train", "val"), ("train", "test"), ("val", "test")):
        notes += _twin_notes(dataset, rows, earlier, later)
    return notes


def _twin_notes(dataset, rows, earlier, later):
    """A note on images of the later set whose file, by another name, is in the earlier one too.

    Whoever learnt the file's composition there is wrong where it has another one here.
    """
    targets_of = {}  # digest -> compositions in the earlier set
    for name, target in zip(dataset.images[earlier], dataset.targets[earlier].tolist()):
        if rows[name].digest:
            targets_of.setdefault(rows[name].digest, set()).add(target)
    own_names = set(dataset.images[earlier])
    twins = 0
    others = 0
    for name, target in zip(dataset.images[later], dataset.targets[later].tolist()):
        if name in own_names or rows[name].digest not in targets_of:
            continue
        twins += 1
        others += target not in targets_of[rows[name].digest]
    if not twins:
        return []
    total = len(dataset.images[later])
    ceiling = (total - others) / total
    return [f"{data.count(twins, later + ' image')} ({twins / total:.1%}) whose file is in "
            f"{earlier} too by another name, {others:,} with another composition: an accuracy "
            f"ceiling of {ceiling:.1%} of {later} for who answers as {earlier} shows"]


# ---- the command line ----------------------------------------------------------------------------


@common.command
def main(argv=None):
    """Extract and cache the features of a dataset's images."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add = parser.add_argument
    add("dataset", help="a name (utzappos, mitstates, cgqa) or a folder")
    add("--data-root", default="data", help="where named datasets lie (default: data)")
    add("--weights", help="ResNet-18's parameters (default: torch hub's cache, else a download)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--batch-size", type=int, default=64, help="images at a time (default: 64)")
    add("--respect-orientation", action="store_true", help="turn photos upright by their EXIF tag")
    add("--skip-broken", action="store_true", help="go on without images that cannot be read")
    add("--cache", metavar="DIR", help="a folder for the cache (default: the dataset's)")
    add("--max-pixels", type=int, metavar="N",
        help="read photos of up to N pixels (default: 179 million)")
    options = parser.parse_args(argv)
    given = data.load(options.dataset, options.data_root)
    dataset, features, about = load_features(
        given, weights=options.weights, device=options.device, batch_size=options.batch_size,
        respect_orientation=options.respect_orientation, skip_broken=options.skip_broken,
        cache=options.cache, max_pixels=options.max_pixels)
    for note in dataset.notes[len(given.notes):]:
        print(note)
    shapes = ", ".join(f"{phase} {table.shape}" for phase, table in features.items())
    print(f"{dataset.folder}: {shapes}; {about}")


if __name__ == "__main__":
    main()
