"""Features of images: torchvision's preprocessing, ResNet-18 in plain PyTorch, a resuming cache.

It has no command line: `python compcos.py` makes the features it needs, and keeps them beside the
images. The backbone is frozen, as in the paper: features are computed once and never trained.
N images, B images of a batch, F numbers a feature; crops are uint8 (height, width, 3).
"""

import copy
import hashlib
import itertools
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import data
from compcos import pick_device
from lab import drawings, shell
from lab.files import check_writable, load_tensors, reading, writing
from lab.photos import (DECODERS, check_names, find_images, missing_photos, open_photo, rgb,
                        with_reasons)

WEIGHTS_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
DIGITS = 8  # the number of digits of a weight file's SHA-256 that name the weights
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images, by channel
PIXELS = "pixels"  # raw pixels, without a backbone: 16 x 16 of them, as for the built-in data
BATCH = 64  # images that the network takes at a time
SAVE_SECONDS = 60  # minimum seconds between two writings of the cache, the most that a kill costs
NESTED = "state_dict", "model_state_dict", "model", "net"  # keys under which loops save parameters


# ---- preprocessing -------------------------------------------------------------------------------


def _crop(image):
    """Scale an RGB image's short side to 256 (bilinear) and crop its centre: (224, 224, 3) uint8.

    Sizes are rounded as torchvision rounds them.
    """
    short = min(image.size)
    size = [int(256 * side / short) for side in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    left = round((image.width - 224) / 2)
    top = round((image.height - 224) / 2)
    return torch.from_numpy(np.array(image.crop((left, top, left + 224, top + 224))))


def _normalise(crops):
    """Normalise (B, 224, 224, 3) uint8 to (B, 3, 224, 224) float32, channels last in memory.

    The operations are torchvision's, in its order.
    """
    batch = crops.permute(0, 3, 1, 2).float().div_(255)
    for channel, mean, std in zip(batch.unbind(1), MEAN, STD):
        channel.sub_(mean).div_(std)  # plain numbers need no copy to a GPU
    return batch


def preprocess(image):
    """Prepare an image for ResNet-18 by torchvision's Resize(256), CenterCrop(224), Normalize.

    Args:
        image: PIL image of any mode and size. Its orientation tag is ignored, as in published
            features; `lab.photos.open_photo` turns a photo by it.

    Returns:
        (3, 224, 224) float32 tensor.

    Raises:
        ValueError: the image holds floats.
    """
    return _normalise(_crop(rgb(image))[None])[0].contiguous()


# ---- ResNet-18 -----------------------------------------------------------------------------------


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, a strided 1 x 1 one where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()  # empty: the identity
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y))
        return (y + self.downsample(x)).relu()


def resnet18():
    """Build an untrained ResNet-18 (He et al., 2016) without its classifier.

    Returns:
        nn.Module, (N, 3, 224, 224) -> (N, 512), whose parameters have torchvision's names
        (`conv1.weight`, `layer2.0.downsample.0.weight`, ...).
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


def unwrap(stored):
    """Return the dict of parameters in the dict that a training loop saved.

    It may be nested under `state_dict`, `model_state_dict`, `model` or `net`, and its names may
    begin with `module.` (data parallel) or `backbone.`; names without that prefix, such as those of
    a head, are then left out.

    >>> unwrap({"epoch": 3, "net": {"module.conv1.weight": 0}})
    {'conv1.weight': 0}
    >>> unwrap({"backbone.bn1.bias": 1, "head.bias": 2})
    {'bn1.bias': 1}
    """
    for name in NESTED:
        if isinstance(stored.get(name), dict):
            return unwrap(stored[name])
    for prefix in ("module.", "backbone."):
        inside = {name.removeprefix(prefix): value for name, value in stored.items()
                  if str(name).startswith(prefix)}
        if inside:
            return unwrap(inside)
    return stored


def _weights_file(weights):
    """Return the given file, or torch hub's path of the published one, which may not exist yet."""
    if weights is None:
        return Path(torch.hub.get_dir(), "checkpoints", WEIGHTS_URL.rpartition("/")[2])
    if not Path(weights).is_file():
        raise FileNotFoundError(f"no weights file {weights}: name a file of ResNet-18's "
                                "parameters, or leave --weights out for torch hub's")
    return Path(weights)


def load_backbone(weights=None):
    """Load a frozen ResNet-18 in evaluation mode, without its classifier.

    Args:
        weights: str or Path of a state dict under torchvision's names, plain or as `unwrap` reads
            it; None: the published weights, from torch hub's cache or by a download, which is
            checked by its hash.

    Returns:
        nn.Module on the CPU, (N, 3, 224, 224) -> (N, 512).

    Raises:
        OSError: the file does not exist, or the download fails.
        ValueError: the file holds something else.
    """
    path = _weights_file(weights)
    if not path.exists():
        try:
            torch.hub.load_state_dict_from_url(WEIGHTS_URL, map_location="cpu", check_hash=True,
                                               weights_only=True)
        except (OSError, RuntimeError) as error:
            raise OSError(f"cannot download ResNet-18's weights ({shell.reason(error)}): fetch "
                          f"{WEIGHTS_URL} elsewhere and put it at {path}, or name the file by "
                          "--weights FILE; training needs no weights with --features FILE"
                          ) from error
    model = resnet18()
    expected = "the parameters of a ResNet-18 under torchvision's names, by torch.save"
    stored = load_tensors(path, expected)
    with reading(path, f"expected {expected}"):
        parameters = unwrap(stored)
        model.load_state_dict({name: value for name, value in parameters.items()
                               if not name.startswith("fc.")})
    return model.to(memory_format=torch.channels_last).requires_grad_(False).eval()


# ---- extraction ----------------------------------------------------------------------------------


def _recipe(backbone, own_preprocess, device):
    """Return two functions: RGB image -> tensor, and batch of such tensors -> features (B, F).

    backbone: a module, of which a copy is used, any callable, or PIXELS.
    """
    if backbone == PIXELS:
        return lambda image: torch.from_numpy(drawings.feature(image)), lambda batch: batch
    if isinstance(backbone, nn.Module):
        backbone = copy.deepcopy(backbone).to(device).eval()
    if own_preprocess is not None:
        return own_preprocess, backbone
    # The crops go to a GPU as bytes, a quarter of the size of floats.
    return _crop, lambda crops: backbone(_normalise(crops))


def prefetch(items, count):
    """Yield the items in order, each after the `count` next ones have been taken, to overlap work.
    """
    begun = deque()
    for item in items:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


def _run(network, device, pixels):
    """Return the features, a float32 array (B, F), of B tensors that form a batch."""
    batch = torch.stack(pixels).to(device)
    # The numbers are the same each time, and as close to those of a CPU as possible.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with torch.inference_mode(), exact:
        features = network(batch)
    if features.ndim != 2 or len(features) != len(batch):
        raise ValueError(f"the backbone returns {tuple(features.shape)} for {len(batch)} images: "
                         "expected (B, F)")
    return features.float().cpu().numpy()


def _batches(paths, backbone, device, upright, batch_size, own_preprocess=None):
    """Yield features {name: (F,) float32} and unreadable {name: reason} of images {name: path}.

    They come batch by batch. Threads decode a few batches ahead of the network, so that it seldom
    waits: Pillow releases the global lock while it decodes and resizes.
    """
    device = pick_device(device)
    prepare, network = _recipe(backbone, own_preprocess, device)
    pool = ThreadPoolExecutor(DECODERS)
    names = list(paths)

    def decode(path):
        return prepare(open_photo(path, upright))

    def begin(first):
        chosen = names[first:first + batch_size]
        return {name: pool.submit(decode, paths[name]) for name in chosen}

    begun = map(begin, range(0, len(names), batch_size))
    try:
        with shell.Progress("extracting", len(names), "images") as progress:
            for answers in prefetch(begun, 2 + 2 * DECODERS // batch_size):
                pixels = {}
                broken = {}
                for name, answer in answers.items():
                    try:
                        pixels[name] = answer.result()
                    except ValueError as error:
                        broken[name] = str(error)
                features = []
                if pixels:
                    features = _run(network, device, list(pixels.values()))
                yield dict(zip(pixels, features)), broken
                progress.update(len(answers))
    finally:  # Ctrl-C does not wait for images that are still queued
        pool.shutdown(cancel_futures=True)


def _check(broken, total, skip, where=""):
    """Return [a note] on the images {name: reason} that lack features, of `total`; [] if none do.

    ValueError names them, unless they are skipped.
    """
    if not broken:
        return []
    reasons = with_reasons(broken)
    if not skip or len(broken) == total:
        raise ValueError(f"{where}no features for {len(broken):,} of {total:,} images: {reasons}; "
                         "mend them, or leave them out by --skip-broken")
    return [f"images left out: {len(broken):,}, {reasons}"]


def extract(paths, *, backbone=None, device="auto", batch_size=BATCH, preprocess=None, upright=True,
            skip_broken=False):
    """Compute the features of image files with a frozen backbone.

    To train on features of your own backbone, save
    `np.savez(FILE, files=names, features=extract(paths, backbone=...))` and pass `--features FILE`.

    Args:
        paths: iterable of N str or Path.
        backbone: None for ResNet-18 with its published weights; a module or any callable that maps
            a batch (B, 3, 224, 224) float32 on the device, as `preprocess` makes it, to (B, F);
            or "pixels" for 16 x 16 raw pixels.
        device: str, see `compcos.pick_device`.
        batch_size: int >= 1, the number of images that the backbone takes at a time.
        preprocess: None for the function above, or a function from a PIL image (RGB) to a tensor,
            such as torchvision, timm and open_clip provide; the backbone then gets batches of
            these.
        upright: bool, whether photos are turned by their EXIF tag.
        skip_broken: bool, whether files that cannot be read get rows of NaN.

    Returns:
        (N, F) float32 array.

    Raises:
        ValueError: `paths` is empty, the backbone returns another shape, or files cannot be read;
            all of these are named.
    """
    paths = list(paths)
    if not paths:
        raise ValueError("no images to extract features of: expected one path or more")
    if backbone is None:
        backbone = load_backbone()
    rows = {}
    broken = {}
    named = dict(zip(paths, paths))
    for features, problems in _batches(named, backbone, device, upright, batch_size, preprocess):
        rows.update(features)
        broken.update(problems)
    _check(broken, len(named), skip_broken)
    nan = np.full_like(next(iter(rows.values())), np.nan)
    return np.stack([rows.get(path, nan) for path in paths])


# ---- features of further photos ------------------------------------------------------------------


def features_like(settings, paths, device="auto", weights=None, skip_broken=False):
    """Compute features (N, F) of image files in the way that a run's settings describe.

    settings: a dict with `backbone`, in words, and `weights`, their file; weights: the file, if it
    has moved since. skip_broken: see `extract`. ValueError: the weights differ from the run's, or
    this module cannot make such features.
    """
    backbone = settings["backbone"]
    upright = "upright" in backbone
    kind = PIXELS if backbone.startswith(drawings.FEATURE) else None
    weights = weights or settings.get("weights")
    # Compared first, so that other weights are neither loaded nor downloaded.
    available = cache_key(kind, weights, upright)
    if not backbone.startswith(available):
        raise ValueError(f"the model was trained on {backbone}, but photos would get {available}: "
                         "give the --weights FILE whose SHA-256 begins with the digits of the "
                         "former, or features of the same kind (--features FILE; in Python an "
                         "array)")
    return extract(paths, backbone=kind or load_backbone(weights), device=device,
                   upright=upright, skip_broken=skip_broken)


def images_and_features(settings, arguments, file=None, **how):
    """Return images and their features (N, F), from a file or of the photos that `arguments` name.

    settings, how: see `features_like`; with its skip_broken, photos that cannot be read are left
    out.
    """
    if file:
        stored = data.read_features(file)
        check_names(stored["files"])
        return stored["files"], stored["features"]
    images = find_images(arguments)
    features = features_like(settings, images, **how)
    images = np.array(images)
    is_whole = np.isfinite(features).all(1)
    if not is_whole.all():
        print(f"note: left out, since they cannot be read: {shell.shorten(images[~is_whole])}")
    return images[is_whole], features[is_whole]


# ---- the cache -----------------------------------------------------------------------------------


def cache_key(kind, weights, upright):
    """Return the words for all that cached features depend on: backbone, weights, preprocessing.

    kind: None for ResNet-18, or PIXELS. Weights are named by the first digits of their SHA-256,
    which are part of the published file's name.
    """
    if kind == PIXELS:
        words = drawings.FEATURE
    else:
        path = _weights_file(weights)
        digits = path.stem[-DIGITS:]
        if path.exists():
            digits = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
        words = f"ResNet-18 (weights {digits}), 224 of 256 pixels"
    if upright:
        words += ", upright"
    return words


def _read_cache(path, key):
    """Return {name: (feature, stamp)} of a cache with this key, {} for another file or none.

    ValueError: it is damaged.
    """
    if not path.exists():
        return {}
    with reading(path, "a cache may be removed, and is then made anew"):
        stored = data.read_features(path)
        if str(stored.get("key")) != key:
            return {}
        stamps = map(tuple, stored["stamps"].tolist())
        return dict(zip(stored["files"], zip(stored["features"], stamps)))


def _write_cache(path, key, rows):
    """Write a cache, whole or not at all, in the first of several processes."""
    if shell.rank() > 0 or not rows:
        return
    features, stamps = zip(*rows.values())
    with writing(path, "wb", shared=True) as file:
        np.savez(file, files=list(rows), features=np.stack(features), stamps=stamps, key=key)


def _known_rows(dataset, places, key, skip_broken):
    """Return {name: (feature, stamp)} of cached files that are unchanged, {name: stamp} of others.

    A stamp is a file's size and time of change. FileNotFoundError: images do not exist, and are not
    skipped.
    """
    stamps = {}
    for name in dataset.every_image:
        path = dataset.path(name)
        if path.exists():
            stamps[name] = path.stat().st_size, path.stat().st_mtime_ns
    problem = missing_photos(dataset)
    if problem and not skip_broken:
        raise FileNotFoundError(f"{problem}; put them there, leave them out by --skip-broken, or "
                                "give --features FILE")
    rows = {}
    for place in places:
        for name, row in _read_cache(place, key).items():
            if stamps.get(name) == row[1]:
                rows[name] = row
    return rows, {name: stamp for name, stamp in stamps.items() if name not in rows}


def extract_missing(dataset, kind, weights, device, fallback, skip_broken, replace_cache):
    """Extract the features that a dataset's caches lack; several processes each take a share.

    Returns {name: feature (F,)}, {name: reason} of images that cannot be read, the key, and notes.
    """
    key = cache_key(kind, weights, dataset.upright)
    name = "pixels_cache.npz" if kind == PIXELS else "features.npz"
    places = dataset.folder / name, Path(fallback, f"{dataset.name}-{name}")
    known = _known_rows(dataset, places, key, skip_broken)
    rows, todo = shell.gather(known)[0]  # all make what the first process lacks
    broken = {}
    notes = []
    if todo:
        place = places[0]
        try:
            check_writable(dataset.folder)
        except OSError:
            place = places[1]
            notes = [f"{dataset.folder} cannot be written: features are cached in {place}"]
        backbone = kind or load_backbone(weights)
        share = list(todo)[shell.rank()::shell.processes()]
        paths = {name: dataset.path(name) for name in share}
        batches = _batches(paths, backbone, device, dataset.upright, BATCH)
        may_write = replace_cache or not place.exists()
        saved_at = time.monotonic()
        try:
            # In each round every process has a batch, or none left.
            for _ in range(0, len(todo), BATCH * shell.processes()):
                for features, problems in shell.gather(next(batches, ({}, {}))):
                    rows.update({name: (features[name], todo[name]) for name in features})
                    broken.update(problems)
                if may_write and time.monotonic() - saved_at > SAVE_SECONDS:
                    _write_cache(place, key, rows)
                    saved_at = time.monotonic()
        finally:  # also at Ctrl-C, so that the next run extracts the others alone
            if may_write:
                _write_cache(place, key, rows)
    return {name: feature for name, (feature, _) in rows.items()}, broken, key, notes


# ---- features of a dataset -----------------------------------------------------------------------


def load_features(dataset, *, file=None, weights=None, device="auto", skip_broken=False,
                  fallback=".", replace_cache=True):
    """Load the features of a dataset's images, or extract and cache them.

    Extracted features are cached in features.npz or pixels_cache.npz, and extracted anew where
    images or weights have changed. Under torchrun all processes call this, and each extracts its
    share.

    Args:
        dataset: data.Dataset.
        file: str or Path of an .npz with `files` and `features` in any order, or the same by
            torch.save; "pixels" for 16 x 16 raw pixels; None for features.npz or
            resnet18_featurers.t7 in the dataset's folder, else for ResNet-18.
        weights: str or Path of ResNet-18's weights, or None, see `load_backbone`.
        device: str, see `compcos.pick_device`.
        skip_broken: bool, whether images without features are left out of the returned dataset.
        fallback: str or Path, the folder for the cache if the dataset's is read-only; a note says
            so.
        replace_cache: bool; if False, a cache that exists already stays as it is, for callers that
            first compare the features with those of an earlier run.

    Returns:
        (Dataset, {phase: (N, F) float32 array}, words for the features, weights file or None).

    Raises:
        FileNotFoundError: photos are missing.
        ValueError: a file is not as expected, or images have no features; all of these are named.
    """
    names = dataset.every_image
    source = data.finished_features(dataset, file)
    broken = {}
    notes = []
    where = ""
    if source is None:
        rows, broken, words, notes = extract_missing(dataset, file, weights, device, fallback,
                                                     skip_broken, replace_cache)
    else:
        stored = data.read_features(source)
        where = f"{source} (of {shell.shorten(stored['files'], 2)}): "
        words = str(stored.get("key", f"features in {source}"))
        rows = dict(zip(stored["files"], stored["features"]))
    is_resnet = words.startswith("ResNet-18")
    if is_resnet and file is None and words != cache_key(None, weights, dataset.upright):
        raise ValueError(f"{source} has features of {words}, and there are no photos for others: "
                         f"give the --weights FILE of the former, or --features {source}")
    if weights is not None:
        weights = str(Path(weights).resolve()) if is_resnet else None
    for name in names:
        if name not in rows:
            broken.setdefault(name, "not there")
        elif not np.isfinite(rows[name]).all():
            broken[name] = "not finite"
    notes += _check(broken, len(names), skip_broken, where)
    dataset = dataset._replace(notes=[*dataset.notes, *notes])
    return *_with_features(dataset, rows, broken), f"{words}, frozen", weights


def _with_features(dataset, rows, broken):
    """Return the dataset without the broken images, and {phase: (N, F)} from {name: feature (F,)}.

    ValueError: a phase has no other images.
    """
    images = {}
    targets = {}
    features = {}
    for phase, every in dataset.images.items():
        stays = [name not in broken for name in every]  # (N,) bool
        if not any(stays):
            raise ValueError(f"no image of {phase} has features")
        images[phase] = list(itertools.compress(every, stays))
        targets[phase] = dataset.targets[phase][stays]
        features[phase] = np.stack([rows[name] for name in images[phase]])
    return dataset._replace(images=images, targets=targets), features
