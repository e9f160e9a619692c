"""Download datasets and word vectors from where they are published, in the layout of data.py.

    python -m lab.download utzappos --data-root DIR

A download is kept in a hidden `.part` file until it is complete, so that an interrupted one goes on
where it ended. Files that exist already stay as they are.
"""

import argparse
import gzip
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections import defaultdict
from pathlib import Path

from lab import shell
from lab.files import reading
import data
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
MB = 2**20
TIMEOUT = 60  # seconds without a byte after which a connection counts as broken
PAUSES = 1, 2, 4, 8, None  # seconds between the tries; None: no further one
RETRY_STATUS = 429, 500, 502, 503, 504  # answers of a busy server, worth another try
ARCHIVE_MAGIC = b"PK", b"\x1f\x8b"  # of zip and of gzip


def download(name=None, root="data", vectors=()):
    """Download what is missing of a dataset and of word vectors.

    Args:
        name (str or None): A dataset: "utzappos", "mitstates" or "cgqa". With any other name, only
            the word vectors are downloaded.
        root (str or Path): The folder that datasets and word vectors are written to.
        vectors (sequence of str): Word vectors: "word2vec", "fasttext", "glove".

    Returns:
        list of str: The keys of URLS that were downloaded or unpacked.

    Raises:
        OSError: A download failed after several tries, a URL does not exist, or the disk is full.
        ValueError: An archive is damaged or another than expected, or there is nothing to download.

    A message names the URL or the archive. No incomplete file is left in the layout.
    """
    root = Path(root)
    downloaded = []
    if name in data.DOWNLOADED:
        folder = root / data.FOLDERS[name]
        labels = "cgqa" if name == "cgqa" else "splits"  # one archive of C-GQA holds everything
        downloaded += obtain(labels, folder, data.METADATA, find_layout)
        downloaded += obtain(name, folder, "images", FIND_IMAGES[name])
    elif not vectors:
        raise ValueError(f"nothing to download: name one of {', '.join(data.DOWNLOADED)}, or pass "
                         f"--vectors with some of {', '.join(FILES)}")
    for source in vectors:
        file = root / FILES[source]
        packed = Path(f"{file}.gz")
        if source == "glove":
            downloaded += obtain(source, file.parent, file.name, find_glove)
        elif not (file.exists() or packed.exists()):
            fetch(URLS[source], packed)
            downloaded.append(source)
    return downloaded


def obtain(source, folder, content, find):
    """Download and unpack an archive unless the folder has its content; return [source] or [].

    An archive that exists was put there by hand, or its unpacking was interrupted: unpack it.
    """
    archive = folder / Path(URLS[source]).name
    if (folder / content).exists() and not archive.exists():
        return []
    fetch(URLS[source], archive)
    unpack(archive, folder, find)
    return [source]


# ---- downloading ---------------------------------------------------------------------------------
#
# torch.hub.download_url_to_file starts anew after each broken connection and waits without limit
# for a server that is silent. These files have up to 4 GB, so they are resumed here.


def fetch(url, file):
    """Download an archive to `file` unless it exists, with several tries where a fault may pass."""
    if file.exists():
        return
    for pause in PAUSES:
        try:
            return fetch_once(url, file)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError,
                TimeoutError) as error:
            problem = f"{url}: {shell.reason(error)}"
            if pause is None or getattr(error, "code", 500) not in RETRY_STATUS:
                raise ConnectionError(f"{problem}; run this again to go on from what has arrived, "
                                      f"or save that file as {file}") from None
        shell.print_status(f"{problem}; trying again in {pause} s")
        time.sleep(pause)


def fetch_once(url, file):
    """Download an archive to `file` in one try, and continue its `.part` file if there is one."""
    with open_url(url) as response:  # for its headers only
        size = int(response.headers.get("Content-Length", 0))  # 0: unknown
    # The size is in the name: another version of the file cannot continue this one.
    part = file.with_name(f".{file.name}.{size}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if size and part.exists() else 0
    need = size - have
    if file.suffix != ".gz":  # the unpacked files take at least as much again
        need += size
    free = shutil.disk_usage(file.parent).free
    if free < need:
        raise OSError(f"not enough space in {file.parent}: {need:,} bytes are needed, {free:,} are "
                      "free")
    if not size or have < size:
        with open_url(url, Range=f"bytes={have}-") as response:
            # With status 206 the server sends the rest, else the whole file.
            save(response, part, "ab" if have and response.status == 206 else "wb", size)
    have = part.stat().st_size
    if size and have != size:
        raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
    with open(part, "rb") as content:
        start = content.read(9)
    if not start.startswith(ARCHIVE_MAGIC):
        part.unlink()
        raise ValueError(f"{url} sent no archive (it begins with {start!r}): open it in a browser, "
                         f"and save the archive as {file}")
    os.replace(part, file)


def open_url(url, **headers):
    """Send a request and return the response."""
    request = urllib.request.Request(url, headers={"User-Agent": "compcos", **headers})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def save(response, part, mode, size):
    """Write a response to `part`, which will have `size` bytes (0: unknown)."""
    with open(part, mode) as out, shell.Progress(part.name, size // MB, "MB") as progress:
        while block := response.read1(MB):
            out.write(block)
            progress.update(out.tell() // MB - progress.done)


# ---- unpacking -----------------------------------------------------------------------------------


def unpack(archive, folder, find):
    """Unpack an archive into a folder and remove it; `find(stage, folder)` gives {place: file}.

    All files are unpacked beside the archive first, then those that `find` returns move to their
    places. If this is killed, the archive stays, and the next run unpacks it anew.
    """
    stage = archive.with_name(f".{archive.name}.unpacked.part")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        with reading(archive, "if it is damaged, remove it and run this again"):
            extract(archive, stage)
        files = find(stage, folder)
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
        return
    with gzip.open(archive) as unpacked, tarfile.open(fileobj=unpacked) as file:
        file.extractall(stage, filter="data")
        unpacked.read()  # to the checksum at the end, which tarfile does not reach


def files_below(folder):
    """List the files below a folder, without links and without those that macOS adds."""
    return [path for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and "__MACOSX" not in path.parts]


# ---- where the files of an archive go ------------------------------------------------------------


def find_glove(stage, folder):
    """Find the vectors of 300 numbers."""
    return {path.name: path for path in stage.rglob(Path(FILES["glove"]).name)}


def find_layout(stage, folder):
    """Find lists, metadata and images in an archive that has the layout already, below a folder."""
    tops = [path.parent for path in stage.rglob(data.SPLIT)]
    files = {}
    for top in tops:
        if len(tops) > 1 and top.name != folder.name:  # another dataset
            continue
        for path in files_below(top):
            place = path.relative_to(top).as_posix()
            if place.startswith((f"{data.SPLIT}/", "metadata_", "images/")):
                files[place] = path
    return files


def find_mitstates(stage, folder):
    """Map `images/wet_dog/1.jpg` to `release_dataset/images/wet dog/1.jpg`, for all images."""
    files = {}
    for path in files_below(stage / "release_dataset/images"):
        files[f"images/{path.parent.name.replace(' ', '_')}/{path.name}"] = path
    return files


def find_utzappos(stage, folder):
    """Map `images/` + the metadata's `image` to the file at its `_image`, below any folder.

    Some zip files do not record their encoding, so that names such as Børn are garbled. Then the
    name of the file alone decides, if it is unique.
    """
    by_name = defaultdict(list)
    for path in files_below(stage):
        by_name[path.name].append(path)
    files = {}
    for image, source in data.read_metadata(folder / data.METADATA, ("image", "_image")):
        source = data.normalize_path(source)
        candidates = by_name[source.rpartition("/")[2]]
        if len(candidates) > 1:
            candidates = [path for path in candidates if path.as_posix().endswith(f"/{source}")]
        if len(candidates) == 1:
            files[f"images/{data.normalize_path(image)}"] = candidates[0]
    return files


FIND_IMAGES = {"utzappos": find_utzappos, "mitstates": find_mitstates, "cgqa": find_layout}


@shell.command
def main(argv=None):
    """Run the command `python -m lab.download`."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.download",
        description="Download a dataset, word vectors, or both. An interrupted download goes on "
                    "where it ended. Files that exist already stay as they are.",
        epilog="example: python -m lab.download utzappos --data-root data --vectors glove")
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help=f"the dataset: {', '.join(data.DOWNLOADED)}; with any other name, "
                             "only --vectors are downloaded")
    parser.add_argument("--data-root", default="data", metavar="DIR",
                        help="folder for datasets and word vectors (default: data)")
    parser.add_argument("--vectors", nargs="+", default=[], choices=list(FILES), metavar="NAME",
                        help="word vectors: word2vec (1.5 GB), fasttext (4.2 GB), glove (0.8 GB)")
    options = parser.parse_args(argv)
    downloaded = download(options.name, options.data_root, options.vectors)
    print(f"downloaded {', '.join(downloaded) or 'nothing'}; see {options.data_root}")


if __name__ == "__main__":
    main()
