"""Download datasets and word vectors from where they are published, in the layout of data.py.

    python -m lab.download utzappos --data-root DIR

A download gets its name once it is complete; a broken one starts anew. Files that exist already
stay as they are.
"""

import argparse
import os
import shutil
import socket
import tarfile
import time
import zipfile
from collections import defaultdict
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

import data
from lab import shell
from lab.files import describe_file, reading
from lab.words import FILES

URLS = {
    "utzappos": "http://vision.cs.utexas.edu/projects/finegrained/utzap50k/ut-zap50k-images.zip",
    "mitstates": "http://wednesday.csail.mit.edu/joseph_result/state_and_transformation/"
                 "release_dataset.zip",
    "cgqa": "https://huggingface.co/datasets/nihalnayak/cgqa/resolve/main/cgqa.zip",
    "splits": "https://senthilpurushwalkam.com/publications/compositional/"
              "compositional_split_natural.tar.gz",
    "word2vec": "https://s3.amazonaws.com/dl4j-distribution/GoogleNews-vectors-negative300.bin.gz",
    "fasttext": "https://dl.fbaipublicfiles.com/fasttext/vectors-crawl/cc.en.300.bin.gz",
    "glove": "https://nlp.stanford.edu/data/glove.6B.zip",
}
TIMEOUT = 60  # seconds without a byte after which a connection counts as broken
PAUSES = 1, 2, 4, 8, None  # seconds between the tries; None: no further one
RETRY_STATUS = 429, 500, 502, 503, 504  # answers of a busy server, worth another try


def download(name=None, root="data", vectors=()):
    """Download what is missing of a dataset and of word vectors.

    Args:
        name (str or None): A dataset: "utzappos", "mitstates" or "cgqa". With any other name, only
            the word vectors are downloaded.
        root (str or Path): The folder that datasets and word vectors are written to.
        vectors (sequence of str): Word vectors: "word2vec", "fasttext", "glove".

    Raises:
        OSError: A download failed after several tries, a URL does not exist, or the disk is full.
        ValueError: An archive is damaged or another than expected, or there is nothing to download.

    A message names the URL or the archive. Incomplete files are removed; only a process that was
    killed by force leaves a `.partial` file, which can be removed by hand.
    """
    root = Path(root)
    if name in data.DOWNLOADED:
        folder = root / data.FOLDERS[name]
        if name != "cgqa":  # its one archive also holds the lists and metadata
            obtain("splits", folder / data.METADATA)
        obtain(name, folder / "images")
    elif not vectors:
        raise ValueError("nothing to download: name a dataset that --help lists, or pass --vectors")
    for source in vectors:
        obtain(source, root / FILES[source])


def obtain(source, content):
    """Download an archive unless the path `content` exists, and unpack it beside that path.

    An archive that exists was put there by hand, or its unpacking was interrupted: unpack it.
    """
    archive = content.with_name(Path(URLS[source]).name)
    if not archive.exists():
        if content.exists():
            return
        archive.parent.mkdir(parents=True, exist_ok=True)
        fetch(URLS[source], archive)
    if source in FIND:  # other word vectors stay packed
        unpack(archive, FIND[source])


# ---- downloading ---------------------------------------------------------------------------------


def fetch(url, file):
    """Download an archive to `file`, with several tries where a fault may pass."""
    for pause in PAUSES:
        try:
            return fetch_once(url, file)
        except (URLError, HTTPException, ConnectionError, TimeoutError) as error:
            problem = f"{url}: {error}"
            if pause is None or getattr(error, "code", 500) not in RETRY_STATUS:
                raise ConnectionError(f"{problem}; run this again, or save that file as "
                                      f"{file}") from None
        shell.print_status(f"{problem}; trying again in {pause} s")
        time.sleep(pause)


def fetch_once(url, file):
    """Download an archive to `file` in one try."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        # torch.hub takes a broken connection for the end of the file, so the size is compared.
        with urlopen(Request(url, headers={"User-Agent": "torch.hub"})) as response:
            size = response.length  # None: unknown
        torch.hub.download_url_to_file(url, file)
    finally:
        socket.setdefaulttimeout(timeout)
    kind = describe_file(file)
    if size not in (None, file.stat().st_size):
        file.unlink()
        raise ConnectionError(f"the connection ended before all {size:,} bytes had come")
    if "archive" not in kind:
        file.unlink()
        raise ValueError(f"{url} sent {kind} instead of an archive: open it in a browser, and save "
                         f"the archive as {file}")


# ---- unpacking -----------------------------------------------------------------------------------


def unpack(archive, find):
    """Unpack an archive into its folder and remove it.

    All files are unpacked into a hidden folder, the stage, beside the archive. Then `find(stage)`
    returns {place in the archive's folder: file}, and these files move to their places. If this is
    killed, the archive stays, and the next run unpacks it anew.
    """
    folder = archive.parent
    stage = archive.with_name(f".{archive.name}.unpacked.part")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        with reading(archive, "if it is damaged, remove it and run this again"):
            extract(archive, stage)
        files = find(stage)
        if not files:
            raise ValueError(f"{archive} is another archive than expected: remove it and run this "
                             "again")
        for place in files:
            if ".." in Path(place).parts:
                raise ValueError(f"{archive}: {place} leads out of {folder}; nothing was unpacked")
        for place, file in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, folder / place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    archive.unlink()


def extract(archive, stage):
    """Unpack a .zip or .tar.gz into a new folder, and nothing outside it."""
    shell.print_status(f"unpacking {archive}")
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            file.extractall(stage)
    else:
        with tarfile.open(archive) as file:
            file.extractall(stage, filter="data")
            file.fileobj.read()  # up to gzip's checksum at the end, which tarfile does not reach


def files_below(folder):
    """List the files below a folder, without links and without those that macOS adds."""
    return [path for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and "__MACOSX" not in path.parts]


# ---- where the files of an archive go ------------------------------------------------------------


def find_glove(stage):
    """Find the vectors of 300 numbers."""
    return {path.name: path for path in stage.rglob("*.300d.txt")}


def find_layout(stage):
    """Find lists, metadata and images in an archive that has the layout already, below a folder."""
    tops = [path.parent for path in stage.rglob(data.SPLIT)]
    files = {}
    for top in tops:
        if len(tops) == 1 or top.name == stage.parent.name:  # else it is another dataset
            for path in files_below(top):
                files[path.relative_to(top)] = path
    return files


def find_mitstates(stage):
    """Map `images/wet_dog/1.jpg` to `release_dataset/images/wet dog/1.jpg`, for all images."""
    files = {}
    for path in files_below(stage / "release_dataset/images"):
        files[f"images/{path.parent.name.replace(' ', '_')}/{path.name}"] = path
    return files


def find_utzappos(stage):
    """Map `images/` + the metadata's `image` to the file at its `_image`, below any folder.

    Some zip files do not record their encoding, so that names such as Børn are garbled. Then the
    name of the file alone decides, if it is unique.
    """
    by_name = defaultdict(list)
    for path in files_below(stage):
        by_name[path.name].append(path)
    files = {}
    for image, source in data.read_metadata(stage.parent / data.METADATA, ("image", "_image")):
        candidates = by_name[Path(source).name]
        if len(candidates) > 1:
            candidates = [path for path in candidates if path.as_posix().endswith(f"/{source}")]
        if len(candidates) == 1:
            files[f"images/{data.normalize_path(image)}"] = candidates[0]
    return files


FIND = {"utzappos": find_utzappos, "mitstates": find_mitstates, "cgqa": find_layout,
        "splits": find_layout, "glove": find_glove}


@shell.command
def main(argv=None):
    """Run the command `python -m lab.download`."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.download",
        description="Download a dataset, word vectors, or both. Files that exist already stay "
                    "as they are.",
        epilog="example: python -m lab.download utzappos --data-root data --vectors glove")
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help=f"the dataset: {', '.join(data.DOWNLOADED)}; with any other name, "
                             "only --vectors are downloaded")
    parser.add_argument("--data-root", default="data", metavar="DIR",
                        help="folder for datasets and word vectors (default: data)")
    parser.add_argument("--vectors", nargs="+", default=[], choices=list(FILES),
                        help="word vectors: word2vec (1.5 GB), fasttext (4.2 GB), glove (0.8 GB)")
    options = parser.parse_args(argv)
    download(options.name, options.data_root, options.vectors)
    print(f"all files are in {options.data_root}")


if __name__ == "__main__":
    main()
