"""Photos: opened as RGB images, found in folders, and checked."""

import functools
import glob
import hashlib
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lab import shell

# The greatest number of threads that decode photos. They share Python's global lock, so that more
# threads become slower again (images a second on 32 cores: 519 with 1 thread, 1,745 with 4, 1,995
# with 8, 1,325 with 16).
DECODERS = 8
TABLES = ".csv", ".npz", ".txt"  # files of a dataset's folder that are no photos
LEFT_BY_SYSTEMS = "@eaDir", "__MACOSX"  # folders of thumbnails and attributes
SUFFIXES = (  # of photos, in lower case
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo",
    ".pbm", ".pgm", ".png", ".ppm", ".tga", ".tif", ".tiff", ".webp")


# ---- opening -------------------------------------------------------------------------------------


def open_photo(path, upright=True):
    """Return a photo as a decoded RGB image of Pillow's.

    Checks, extraction and prediction all open photos by this function. It takes any format that
    Pillow opens, and converts modes by `rgb`. With `upright` the photo is turned by its EXIF tag.
    ValueError: the reason why it cannot be read, without the file's name.
    """
    register_plugins()
    try:
        with Image.open(path) as image:
            image.load()
            if upright:
                # Damaged tags raise many kinds of errors, and the picture beside them is whole.
                with suppress(Exception):
                    ImageOps.exif_transpose(image, in_place=True)
            image.info.clear()  # tags by which others would turn it once more
            return rgb(image)
    except UnidentifiedImageError:
        problem = "not an image that Pillow opens here; .heic needs `pip install pillow-heif`"
        if os.path.getsize(path) == 0:
            problem = "an empty file"
        raise ValueError(problem) from None
    except Exception as error:  # decoders of broken files raise many kinds
        raise ValueError(str(error) or repr(error)) from error


@functools.cache
def register_plugins():
    """Let Pillow open HEIC photos, where pillow_heif is installed."""
    try:
        import pillow_heif
        pillow_heif.register_heif_opener()
    except ImportError:
        pass


def rgb(image):
    """Return an image in RGB, with 16-bit grey values scaled to 8 bits.

    Pillow alone would make these white. ValueError: the image holds floats, of unknown range.
    """
    if image.mode == "F":
        raise ValueError("an image of floats: save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


# ---- finding -------------------------------------------------------------------------------------


def walk(folder, above=()):
    """Yield the paths of all files below a folder, without hidden ones.

    Links to folders are followed, unless they lead back to one of the folders `above`. OSError: a
    folder that cannot be listed.
    """
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in LEFT_BY_SYSTEMS:
            continue
        if path.is_dir():
            yield from walk(path, (*above, real))
        else:
            yield path


def check_names(names):
    """Raise a ValueError unless all file names can be written in UTF-8, as tables are."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the file name {name!r} is not UTF-8: rename the file") from None


def list_photos(root):
    """Return the names of the photos below `root`, sorted, with `/` between folders.

    Print a note on other files but tables. ValueError: a name is not UTF-8.
    """
    photos = []
    others = []
    for path in walk(Path(root)):
        if path.suffix not in TABLES:
            names = photos if path.suffix.lower() in SUFFIXES else others
            names.append(path.relative_to(root).as_posix())
    check_names(photos)
    if others:
        print(f"note: left out of {root}, since their names are not those of photos: "
              f"{shell.shorten(sorted(others))}; save photos among them as JPEG or PNG")
    return sorted(photos)


def find_images(arguments):
    """Return the image files that files, patterns and folders name, each once, in order.

    ValueError: there are none.
    """
    images = []
    for argument in arguments:
        matches = []
        if not Path(argument).exists():  # a pattern that the shell did not expand
            matches = sorted(glob.glob(argument))
        for path in map(Path, matches or [argument]):
            if path.is_dir():
                images += [path / photo for photo in list_photos(path)]
            else:  # a missing file is named, with all others, when it is opened
                images.append(path)
    if not images:
        raise ValueError(f"no image in {shell.shorten(arguments)}")
    names = list(map(str, dict.fromkeys(images)))
    check_names(names)
    return names


# ---- checking ------------------------------------------------------------------------------------


def missing_photos(dataset):
    """Return a line that names the images without a photo, "" if there are none."""
    missing = [image for image in dataset.every_image if not dataset.path(image).exists()]
    if not missing:
        return ""
    return (f"found neither in {dataset.folder}/images/ nor in {dataset.folder}/ (.jpg and .JPG "
            f"differ): {shell.shorten(missing)}")


def broken_photos(dataset):
    """Return {image: reason} of the photos that cannot be decoded to their end."""
    def problem(image):
        try:
            open_photo(dataset.path(image), dataset.upright)
        except ValueError as error:
            return str(error)

    names = dataset.every_image
    broken = {}
    with (ThreadPoolExecutor(DECODERS) as pool,
          shell.Progress("decoding", len(names), "images") as progress):
        for image, reason in zip(names, pool.map(problem, names)):
            if reason is not None:
                broken[image] = reason
            progress.update()
    return broken


def repeated_photos(dataset):
    """Return lists of images of several sets whose files hold the same bytes."""
    sets_of = defaultdict(dict)  # content -> {image: phase}
    for phase, images in dataset.images.items():
        for image in images:
            content = hashlib.sha256(dataset.path(image).read_bytes()).digest()
            sets_of[content][image] = phase
    return [list(phases) for phases in sets_of.values() if len(set(phases.values())) > 1]


def with_reasons(broken):
    """Return a text of the first 20 of {name: reason}, and how many more there are."""
    return shell.shorten([f"{name} ({reason})" for name, reason in broken.items()], 20)
