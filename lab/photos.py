"""Photos: opened as RGB images, listed below a folder, and checked."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lab import shell

# Threads that decode photos, at most. They share the interpreter, so that more are slower again
# (images a second on 32 cores: 519 with 1, 1,745 with 4, 1,995 with 8, 1,325 with 16).
DECODERS = 8
MOST_RATIO = 2_500  # of a photo's sides: brought to 256 pixels on the short one, more fill memory
TABLES = ".csv", ".npz", ".txt"  # what is no photo in the folder of a dataset
# Formats that Pillow registers but that hold no photo (drawings, films, measurements).
NO_PHOTOS = {"BUFR", "EPS", "FLI", "GRIB", "HDF5", "IPTC", "MPEG", "PALM", "PDF", "WMF"}


def open_photo(path, upright=True):
    """A photo as an RGB image of Pillow's, decoded: how check, extraction and prediction read one.

    Any format that Pillow opens; the modes as by `rgb`. upright: turned by its EXIF tag, without
    it as it is stored. ValueError says why it cannot be read, and does not name the file.
    """
    register_plugins()
    try:
        with Image.open(path) as image:
            if max(image.size) > MOST_RATIO * min(image.size):
                raise ValueError(f"a strip of {image.width} x {image.height} pixels, too thin")
            image.load()
            if upright:
                turn_upright(image)
            image.info.clear()  # of tags by which others would turn it once more
            return rgb(image)
    except UnidentifiedImageError:
        raise ValueError("not an image that Pillow opens here; .heic needs `pip install "
                         "pillow-heif`") from None
    except Exception as error:  # decoders of broken files raise all sorts
        raise ValueError(str(error) or repr(error)) from error


def turn_upright(image):
    """Turn a decoded image, in place, by its EXIF tag, if that can be read."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # of damaged tags all sorts; the picture beside them is whole
        pass


@functools.cache
def register_plugins():
    """Let Pillow open HEIC photos, where pillow_heif is installed."""
    try:
        import pillow_heif
        pillow_heif.register_heif_opener()
    except ImportError:
        pass


def rgb(image):
    """PIL's conversion, but of 16-bit greys their upper 8 bits, and floats in [0, 1] times 255: PIL
    alone would make white and black of these. ValueError: other floats.
    """
    values = np.asarray(image)
    if image.mode == "F":
        values = 255 * values + 0.5
        if not (values.min() >= 0 and values.max() < 256):  # NaN neither
            raise ValueError("floats outside [0, 1]: save it with 8 or 16 bits")
    elif image.mode.startswith("I"):
        values = (values >> 8).clip(0, 255)
    else:
        return image.convert("RGB")
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def photo_suffixes():
    """The suffixes, in lower case, of the photos that Pillow opens here, plugins included."""
    register_plugins()
    suffixes = Image.registered_extensions()
    opened = set(Image.OPEN) - NO_PHOTOS | {"MPO"}  # which the plugin of JPEG opens
    return {suffix for suffix, name in suffixes.items() if name in opened}


def photo_files(root):
    """(photos, left out): names of files below `root`, `/` between folders, sorted.

    Links to folders are followed. Hidden files, tables, and what systems leave behind (@eaDir,
    __MACOSX) are in neither list. OSError: a folder that may not be looked into.
    """
    def stop(error):
        raise error

    suffixes = photo_suffixes()
    photos = []
    left_out = []
    for folder, subfolders, files in os.walk(root, onerror=stop, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "@", "__"))]
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or path.suffix in TABLES:
                continue
            found = photos if path.suffix.lower() in suffixes else left_out
            found.append(path.relative_to(root).as_posix())
    return sorted(photos), sorted(left_out)


def what_stayed_out(left_out):
    """A note on files that are no photos here, and what to do if some are."""
    return (f"left out, since Pillow does not open them as photos here: {shell.shorten(left_out)}; "
            "save photos among them as JPEG or PNG, or `pip install pillow-heif` for .heic")


def missing_photos(dataset):
    """A line that names the images without a photo, and files whose names differ only in case
    (.jpg, .JPG); "" if there are none."""
    lost = [image for image in dataset.every_image if not dataset.path(image).exists()]
    if not lost:
        return ""
    text = (f"found neither in {dataset.folder}/images/ nor in {dataset.folder}/: "
            f"{shell.shorten(lost)}")
    wanted = {image.casefold() for image in lost}
    photos, _ = photo_files(dataset.folder)
    near = [photo for photo in photos if photo.removeprefix("images/").casefold() in wanted]
    if near:
        text += f"; {shell.shorten(near)} there differ only in case"
    return text


def broken_photos(dataset):
    """{image: why} of the photos that are there and cannot be read; each is decoded to its end."""
    def problem(image):
        try:
            open_photo(dataset.path(image), dataset.upright)
        except FileNotFoundError:
            pass  # see missing_photos
        except ValueError as error:
            return str(error)

    names = dataset.every_image
    broken = {}
    with (ThreadPoolExecutor(DECODERS) as pool,
          shell.Progress("decoding", len(names), "images") as progress):
        for image, why in zip(names, pool.map(problem, names)):
            if why is not None:
                broken[image] = why
            progress.update()
    return broken


def with_reasons(broken, most=5):
    """The first few of {name: why}, and how many more."""
    return shell.shorten([f"{name} ({why})" for name, why in broken.items()], most)
