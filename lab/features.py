"""Images to features: torchvision's preprocessing, ResNet-18 in plain PyTorch, a resuming cache.

It has no command line: `python compcos.py` makes the features it needs, and keeps them beside the
images. The backbone is frozen, as in the paper: features are computed once and never trained.
Legend: N images, B images of a batch, F numbers a feature; crops are uint8 (height, width, 3).
"""

import copy
import glob
import hashlib
import itertools
import os
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from lab import shell
from lab.files import check_writable, load_tensors, reading, writing
from lab.photos import (DECODERS, missing_photos, open_photo, photo_files, photo_suffixes, rgb,
                        what_stayed_out, with_reasons)
import data
from lab import drawings

WEIGHTS_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
DIGITS = 8  # that name weights: the first ones of their file's SHA-256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images, by channel
PIXELS = "pixels"  # the backbone that is none: small pixels, as of the built-in data
BATCH = 64  # images that the network takes at a time
SAVE_EVERY = 60  # seconds: how much of an extraction a kill may cost
NESTED = "state_dict", "model_state_dict", "model", "net"  # where training loops put parameters


# ---- preprocessing -------------------------------------------------------------------------------


def _crop(image):
    """RGB image -> (224,224,3) uint8: short side to 256 (bilinear), centre 224 x 224.

    Rounded as torchvision rounds.
    """
    short = min(image.size)
    size = [int(256 * side / short) for side in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    left = round((image.width - 224) / 2)
    top = round((image.height - 224) / 2)
    return torch.from_numpy(np.array(image.crop((left, top, left + 224, top + 224))))


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

    Any mode becomes RGB by `rgb`; ValueError: floats outside [0, 1]. Orientation tags are
    ignored, as in published features: open photos by `open_photo` if they should count.
    """
    return _normalise(_crop(rgb(image))[None])[0].contiguous()


# ---- ResNet-18 -----------------------------------------------------------------------------------


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: a strided 1 x 1 one where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()  # without parts: the identity
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y))
        return (y + self.downsample(x)).relu()


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


def unwrap(stored):
    """The dict of parameters in what a training loop saved.

    It may be nested under `state_dict`, `model_state_dict`, `model` or `net`, and its names may
    begin with `module.` (data parallel) or `backbone.`; then other parts, a head, are left out.
    ValueError: it is no dict of parameters.

    >>> unwrap({"epoch": 3, "net": {"module.conv1.weight": 0}})
    {'conv1.weight': 0}
    >>> unwrap({"backbone.bn1.bias": 1, "head.bias": 2})
    {'bn1.bias': 1}
    """
    if not isinstance(stored, dict):
        raise ValueError(f"a {type(stored).__name__}, expected a dict of parameters by name")
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
    """The file given, else where torch hub keeps the published one (it may not be there yet)."""
    if weights is None:
        return Path(torch.hub.get_dir(), "checkpoints", WEIGHTS_URL.rpartition("/")[2])
    if not Path(weights).is_file():
        raise FileNotFoundError(f"no weights file {weights}: name one of ResNet-18's parameters, "
                                "or none for torch hub's")
    return Path(weights)


def load_backbone(weights=None):
    """ResNet-18, frozen, with weights of a file, else of torch hub's cache, else of a download.

    The download is checked by its hash. The file is a state dict under torchvision's names, plain
    or as `unwrap` reads it; its classifier (`fc`) is dropped. Raises OSError if there is no such
    file or the download fails, ValueError if the file holds something else.
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
    with reading(path, "expected the parameters of a ResNet-18 under torchvision's names"):
        parameters = unwrap(load_tensors(path))
        model.load_state_dict({name: value for name, value in parameters.items()
                               if not name.startswith("fc.")})
    return model.to(memory_format=torch.channels_last).requires_grad_(False).eval()


def pick_device(name="auto"):
    """The torch.device of "auto" (the best there is), "cpu", "cuda", "cuda:1", "mps".

    Under torchrun "auto" and "cuda" are the process's own GPU. ValueError: it is not there.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found else "cpu"
    try:
        if name == "cuda" and "LOCAL_RANK" in os.environ:
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
            torch.cuda.set_device(name)  # of streams and graphs, too
        torch.zeros(1, device=name)
    except Exception as error:  # of PyTorch all sorts, by kind of device and of its build
        raise ValueError(f"no device {name!r} on this machine ({shell.reason(error)}); "
                         "choose auto, cpu, cuda or mps") from None
    return torch.device(name)


# ---- extraction ----------------------------------------------------------------------------------


def _recipe(backbone, own_preprocess, device):
    """How images become features: (RGB image -> tensor, batch of these tensors -> (B, F)).

    backbone: a module, which stays where and as it is, any callable, or PIXELS.
    """
    if backbone == PIXELS:
        return lambda image: torch.from_numpy(drawings.feature(image)), lambda batch: batch
    if isinstance(backbone, nn.Module):
        backbone = copy.deepcopy(backbone).to(device).eval()
    if own_preprocess is not None:
        return own_preprocess, backbone
    # Bytes go to a GPU, a quarter of what floats would be.
    return _crop, lambda crops: backbone(_normalise(crops))


def prefetch(items, count):
    """The same items, each handed on when `count` later ones have been begun: their work overlaps.
    """
    begun = deque()
    for item in items:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


def _run(network, device, pixels):
    """Features (B,F) float32, an array, of B tensors that the network takes as a batch."""
    batch = torch.stack(pixels).to(device)
    # The same numbers each time, and those of the CPU as far as possible.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with torch.inference_mode(), exact:
        features = network(batch)
    if features.ndim != 2 or len(features) != len(batch):
        raise ValueError(f"the backbone makes {tuple(features.shape)} of {len(batch)} images, "
                         "expected (B, F)")
    return features.float().cpu().numpy()


def _batches(paths, backbone, device, upright, batch_size, own_preprocess=None):
    """Of images {name: path}, yield {name: feature (F,) float32} and {name: why it cannot be read},
    batch by batch.

    Threads decode a few batches ahead of the network (PIL releases the interpreter while it
    decodes and resizes), so that the network seldom waits.
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
    finally:  # Ctrl-C does not wait for the rest
        pool.shutdown(cancel_futures=True)


def _check(broken, total, skip, where=""):
    """[a note] on the images {name: why} of `total` without features, [] if all have them.

    ValueError names them unless they are skipped.
    """
    if not broken:
        return []
    reasons = with_reasons(broken, 20)
    if not skip or len(broken) == total:
        raise ValueError(f"{where}no features of {len(broken):,} of {total:,} images: {reasons}; "
                         "mend them, or leave them out by --skip-broken")
    return [f"images left out: {len(broken):,}, {reasons}"]


def extract(paths, *, backbone=None, device="auto", batch_size=BATCH, preprocess=None, upright=True,
            skip_broken=False):
    """Image files -> (N,F) float32 features.

    backbone: None, ResNet-18 with its published weights; a module or any callable, (B,3,224,224)
    float32 on the device, as `preprocess` makes them, -> (B,F); or "pixels": 16 x 16 of them.
    preprocess: any function from a PIL image (RGB) to a tensor, as torchvision, timm and open_clip
    hand out; the backbone then gets a batch of these.
    upright: turn photos by their EXIF tag.
    skip_broken: rows of unreadable files are NaN; otherwise one ValueError names them all.

    To train on features of your own backbone, save
    `np.savez(FILE, files=names, features=extract(paths, backbone=...))` and pass `--features FILE`.
    """
    paths = list(paths)
    if not paths:
        raise ValueError("no images to extract features of: expected a list of one path or more")
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
    """Features (N,F) of image files, made as those that a run's settings tell of.

    settings: a dict with `backbone`, in words, and `weights`, their file; weights: where that is
    now, if it has moved. skip_broken: as of `extract`. ValueError: other weights than the run's,
    or features that nothing here makes.
    """
    backbone = settings["backbone"]
    upright = "upright" in backbone
    kind = PIXELS if backbone.startswith(drawings.FEATURE) else None
    weights = weights or settings.get("weights")
    # BaselineModel first: what has other weights need not be loaded, let alone fetched.
    available = cache_key(kind, weights, upright)
    if not backbone.startswith(available):
        raise ValueError(f"the model was trained on {backbone}; of photos {available} can be made: "
                         "give the --weights FILE whose SHA-256 begins as there, or features of "
                         "the same kind (--features FILE; to predict() an array)")
    return extract(paths, backbone=kind or load_backbone(weights), device=device,
                   upright=upright, skip_broken=skip_broken)


def find_images(arguments):
    """The image files that files, patterns and folders name, each once, in order. What of a folder
    is no photo is said, and what a pattern such as `new/*.jpg` leaves beside its photos."""
    found = []
    for argument in arguments:
        matches = []
        if not Path(argument).exists():  # a pattern that the shell left as it is
            matches = sorted(glob.glob(argument))
        for path in map(Path, matches or [argument]):
            if path.is_dir():
                photos, left_out = photo_files(path)
                found += [path / photo for photo in photos]
                if left_out:
                    print(f"note: {path}: {what_stayed_out(left_out)}")
            else:  # a missing file is named, with all others, when it is opened
                found.append(path)
    if not found:
        raise ValueError(f"no image in {shell.shorten(arguments)}")
    suffixes = photo_suffixes()
    endings = {path.suffix for path in found}
    left = []
    for folder in {path.parent for path in found if path.exists()}:
        left += [path for path in folder.iterdir()
                 if path.suffix.lower() in suffixes and path.suffix not in endings]
    if left and found != list(map(Path, arguments[:1])):  # who names one photo wants that one
        print(f"note: photos beside these with other endings are left: {shell.shorten(sorted(left))}")
    return list(map(str, dict.fromkeys(found)))


def images_and_features(settings, arguments, file=None, **how):
    """(images, features (N, F)) of a file of features, or of the photos that `arguments` name.

    settings, how: as of `features_like`; with its skip_broken, photos that cannot be read are left
    out.
    """
    if file:
        stored = data.read_features(file)
        return stored["files"], stored["features"]
    images = find_images(arguments)
    features = features_like(settings, images, **how)
    images = np.array(images)
    is_whole = np.isfinite(features).all(1)
    if not is_whole.all():
        print(f"note: broken and left out: {shell.shorten(images[~is_whole])}")
    return images[is_whole], features[is_whole]


def is_shifted(features, checkpoint):
    """Whether features (N, F) lie far from training's, by their mean and variance (F,).

    Of the same kind, the mean of (x - mean)² / variance over numbers and images is about 1: 0.9 to
    1.1 for the validation and test images of fashion, textures and the built-in data, at most 1.9
    for those of one object, at most 3.7 for a single one; with the numbers in another order 1.9
    to 4. The mean of x² is at least 0.36 of that in training; of images divided by their length, it
    is 0.003.
    """
    mean = checkpoint["feature_mean"].to(features)
    variance = checkpoint["feature_std"].to(features).square()
    variance += 1e-3 * variance.mean()  # what hardly varied in training tells little
    distance = ((features - mean).square() / variance).mean()
    size = features.square().mean() / (mean.square() + variance).mean()
    return bool(distance > 1.7 + 2.8 / len(features) ** 0.5 or size < 0.2)


# ---- the cache -----------------------------------------------------------------------------------


def cache_key(kind, weights, upright):
    """What cached features depend on, in words: backbone, weights, preprocessing.

    kind: None, those of ResNet-18, or PIXELS. The weights by the first digits of their SHA-256,
    which the published file has in its name.
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


def _writable_place(own, elsewhere):
    """(where the cache is to be written, notes): in the dataset's folder, or elsewhere where that
    cannot be written."""
    try:
        check_writable(own.parent)
        return own, []
    except OSError:
        return elsewhere, [f"{own.parent} cannot be written: features are cached in {elsewhere}"]


def _read_cache(path, key):
    """{name: (feature, stamp)} of a cache with this key; {} of another file, or none.

    ValueError: it is damaged.
    """
    if not path.exists():
        return {}
    with reading(path, "a cache may be removed, it is then made again"):
        stored = data.read_features(path)
        if str(stored.get("key")) != key:
            return {}
        stamps = map(tuple, stored["stamps"].tolist())
        return dict(zip(stored["files"], zip(stored["features"], stamps)))


def _write_cache(path, key, rows):
    """Write a cache, whole or not at all; of two commands at once the last one's stays. Of several
    processes the first one writes."""
    if shell.rank() > 0 or not rows:
        return
    features, stamps = zip(*rows.values())
    with writing(path, "wb", shared=True) as file:
        np.savez(file, files=list(rows), features=np.stack(features), stamps=stamps, key=key)


def _known_rows(dataset, places, key, skip_broken):
    """What caches hold of files that are as they were, {name: (feature, stamp)}, and {name: stamp}
    of the other files; a stamp is the size and the time of change.

    FileNotFoundError: images that are not there, unless they are skipped.
    """
    stamps = {}
    for name in dataset.every_image:
        path = dataset.path(name)
        if path.exists():
            stamps[name] = path.stat().st_size, path.stat().st_mtime_ns
    problem = missing_photos(dataset)
    if problem and not (skip_broken and stamps):
        raise FileNotFoundError(f"{problem}; put them there, or give --features FILE; `python "
                                "data.py` says whether others are broken")
    rows = {}
    for place in places:
        for name, row in _read_cache(place, key).items():
            if stamps.get(name) == row[1]:
                rows[name] = row
    return rows, {name: stamp for name, stamp in stamps.items() if name not in rows}


def extract_missing(dataset, kind, weights, device, fallback, skip_broken):
    """Extract what a dataset's caches lack. Several processes each take a share.

    Returns {name: feature (F,)}, {name: why it cannot be read}, the key, and notes.
    """
    key = cache_key(kind, weights, dataset.upright)
    name = "pixels_cache.npz" if kind == PIXELS else "features.npz"
    places = dataset.folder / name, Path(fallback, f"{dataset.name}-{name}")
    known = _known_rows(dataset, places, key, skip_broken)
    rows, todo = shell.gather(known)[0]  # what the first process lacks is what all make
    broken = {}
    notes = []
    if todo:
        place, notes = _writable_place(*places)
        backbone = kind or load_backbone(weights)
        share = list(todo)[shell.rank()::shell.processes()]
        paths = {name: dataset.path(name) for name in share}
        batches = _batches(paths, backbone, device, dataset.upright, BATCH)
        saved = time.monotonic()
        # In each round every process has a batch, or none left.
        for _ in range(0, len(todo), BATCH * shell.processes()):
            for features, problems in shell.gather(next(batches, ({}, {}))):
                rows.update({name: (features[name], todo[name]) for name in features})
                broken.update(problems)
            if time.monotonic() - saved > SAVE_EVERY:
                _write_cache(place, key, rows)
                saved = time.monotonic()
        _write_cache(place, key, rows)
    return {name: feature for name, (feature, _) in rows.items()}, broken, key, notes


# ---- features of a dataset -----------------------------------------------------------------------


def load_features(dataset, *, file=None, weights=None, device="auto", skip_broken=False,
                  fallback="."):
    """(dataset, {phase: (N,F) float32}, what they are in words, the weights file or None).

    file: .npz with `files` and `features` in any order, or the same by torch.save; "pixels": 16 x
    16 of them, made here. None: features.npz or resnet18_featurers.t7 in the dataset's folder,
    else ResNet-18's with `weights` (see `load_backbone`). What is made here is cached, in
    features.npz or pixels_cache.npz, and made anew where images or weights are others than before.

    fallback: the folder for the cache if the dataset's cannot be written, which a note says.
    skip_broken: the dataset comes back without the images that have no features; otherwise
    ValueError names them all. Under torchrun all processes call this; each extracts its share.
    """
    names = dataset.every_image
    source = data.finished_features(dataset, file)
    broken = {}
    notes = []
    where = ""
    if source is None:
        rows, broken, words, notes = extract_missing(dataset, file, weights, device, fallback, skip_broken)
    else:
        stored = data.read_features(source)
        where = f"{source} (of {shell.shorten(stored['files'], 2)}): "
        words = str(stored.get("key", f"features in {source}"))
        rows = dict(zip(stored["files"], stored["features"]))
    is_resnet = words.startswith("ResNet-18")
    if is_resnet and file is None and words != cache_key(None, weights, dataset.upright):
        raise ValueError(f"{source} has features of {words}, and no photos are there to make "
                         f"others: give the --weights FILE of these, or --features {source}")
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
    """(dataset, {phase: (N,F)}) of {name: feature (F,)}, without the broken images.

    ValueError: a phase has no other ones.
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
