"""Datasets and word vectors from where they are published, in the layout of data.py: `python data.py NAME --download`.

What arrives is kept as a hidden `.part` file until it is whole, so that the next run goes on where this one ended.
"""

import gzip
import http.client
import os
import shutil
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import common
import data

ADDRESSES = {
    "utzappos": "http://vision.cs.utexas.edu/projects/finegrained/utzap50k/ut-zap50k-images.zip",
    "mitstates": "http://wednesday.csail.mit.edu/joseph_result/state_and_transformation/release_dataset.zip",
    "cgqa": "https://huggingface.co/datasets/nihalnayak/cgqa/resolve/main/cgqa.zip",
    "splits": "https://senthilpurushwalkam.com/publications/compositional/compositional_split_natural.tar.gz",
    "word2vec": "https://s3.amazonaws.com/dl4j-distribution/GoogleNews-vectors-negative300.bin.gz",
    "fasttext": "https://dl.fbaipublicfiles.com/fasttext/vectors-crawl/cc.en.300.bin.gz",
    "glove": "https://nlp.stanford.edu/data/glove.6B.zip",
}
VECTORS = {
    "word2vec": "w2v/GoogleNews-vectors-negative300.bin.gz",
    "fasttext": "fast/cc.en.300.bin.gz",
    "glove": "glove/glove.6B.300d.txt",
}
MB = 2**20


def download(name, root="data", vectors=()):
    """Fetch what is missing of the dataset `name` and of the word vectors (keys of VECTORS) under `root`.

    Raises OSError (no connection, no such address, disk full) or ValueError (not what was expected), leaving nothing
    half-written in the layout.
    """
    root = Path(root)
    if name in data.FOLDERS:
        folder = root / data.FOLDERS[name]
        labelled, pictured = (folder / f"metadata_{data.SPLIT}.t7").exists(), (folder / "images").is_dir()
        if name != "cgqa" and not labelled:
            obtain("splits", folder, plan_layout)
        if not pictured or name == "cgqa" and not labelled:
            obtain(name, folder, {"utzappos": plan_utzappos, "mitstates": plan_mitstates, "cgqa": plan_layout}[name])
    elif not vectors:
        raise ValueError(f"no address for {name!r}: only {', '.join(data.FOLDERS)} can be downloaded")
    for source in vectors:
        file = root / VECTORS[source]
        if file.exists() or file.with_name(file.name.removesuffix(".gz")).exists():
            continue
        if file.suffix == ".gz":
            fetch(ADDRESSES[source], file)
        else:
            obtain(source, file.parent, lambda names, folder: [(name, name) for name in names if name == file.name])


def obtain(source, folder, plan):
    """Fetch an archive into `folder`, unpack what `plan` says, remove it."""
    url = ADDRESSES[source]
    archive = folder / url.rpartition("/")[2]
    fetch(url, archive, copies=2)
    unpack(archive, folder, plan)
    archive.unlink()


def fetch(url, file, *, copies=1, timeout=60, tries=4, wait=1):
    """Download an archive (.zip, .gz) to `file` unless it is there, going on from what an earlier try left.

    copies: how many files of this size the disk must have room for; timeout: seconds without a byte that end a try;
    wait: seconds before the second try, doubled before each further one.
    """
    file = Path(file)
    if file.exists():
        return
    for attempt in range(tries):
        time.sleep(wait * 2 ** (attempt - 1) if attempt else 0)
        try:
            return receive(url, file, copies, timeout)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise OSError(f"{url}: {why}; if it has moved, save that file as {file}") from None
    raise OSError(f"{url}: {why}; what has come is kept, run it again to go on")


def receive(url, file, copies, timeout):
    """One try of `fetch`. ConnectionError if the answer ends early."""
    with ask(url, timeout) as answer:
        file.parent.mkdir(parents=True, exist_ok=True)
        size, headers = int(answer.headers.get("Content-Length", 0)), answer.headers
        version = f"{url} {size} {headers.get('ETag', headers.get('Last-Modified'))}"  # another's part is no start
        part = file.with_name(f".{file.name}.{zlib.crc32(version.encode()):08x}.part")
        have = part.stat().st_size if size and part.exists() else 0
        ensure_room(file.parent, copies * size - have)
        if not have:
            save(answer, part, 0, size)
    if 0 < have < size:
        with ask(url, timeout, Range=f"bytes={have}-") as answer:
            save(answer, part, have if answer.status == 206 else 0, size)
    have = part.stat().st_size
    if size and have != size:
        raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
    with open(part, "rb") as begun:
        start = begun.read(200)
    if start[:2] not in (b"PK", b"\x1f\x8b"):
        part.unlink()
        what = "an HTML page" if start.lstrip()[:1] == b"<" else f"a file that begins {start[:12]!r}"
        raise ValueError(f"{url} gave {what}, not an archive: see it in a browser, and save the archive as {file}")
    os.replace(part, file)


def ask(url, timeout, **headers):
    """Open an address."""
    request = urllib.request.Request(url, headers={"User-Agent": "compcos", **headers})
    return urllib.request.urlopen(request, timeout=timeout)


def save(answer, part, have, size):
    """Write an answer to `part` after the first `have` of `size` bytes (0: unknown)."""
    with open(part, "ab" if have else "wb") as out, common.Progress(part.name, size // MB, "MB") as progress:
        progress.update(have // MB)
        while block := answer.read1(MB):
            out.write(block)
            progress.update(out.tell() // MB - progress.done)


def ensure_room(folder, need):
    """OSError unless the disk of `folder` has `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{folder}: {need / MB:,.0f} MB are needed, {free / MB:,.0f} MB are free")


@contextmanager
def opened(archive):
    """The plain files, neither folders nor links, of a .zip or .tar.gz: name -> (size, function that opens it)."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            yield {info.filename: (info.file_size, partial(file.open, info)) for info in file.infolist()
                   if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)}
    else:
        with gzip.open(archive) as whole:
            while whole.read(MB):  # to the checksum at the end, where tarfile does not come
                pass
        with tarfile.open(archive) as file:
            yield {info.name: (info.size, partial(file.extractfile, info)) for info in file if info.isfile()}


def unpack(archive, folder, plan):
    """Unpack the files that plan(names, folder) -> [(name, place under folder)] asks for: all of them or none."""
    stage = folder / ".unpacked.part"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        with opened(archive) as files:
            wanted = plan(list(files), folder)
            outside = [place for _, place in wanted if place[:1] == "/" or ".." in place.replace("\\", "/").split("/")]
            if outside or not wanted:
                found = f"names outside the folder ({data.some(outside)})" if outside else f"only {data.some(files)}"
                raise ValueError(f"{archive} holds {found}: nothing was unpacked, it is not the archive meant")
            ensure_room(folder, sum(files[name][0] for name, _ in wanted))
            with common.Progress(f"unpacking {archive.name}", len(wanted), "files") as progress:
                for name, place in wanted:
                    (stage / place).parent.mkdir(parents=True, exist_ok=True)
                    with files[name][1]() as source, open(stage / place, "wb") as out:
                        shutil.copyfileobj(source, out)
                    progress.update()
        for part in stage.iterdir():
            if (folder / part.name).is_dir():
                shutil.copytree(part, folder / part.name, dirs_exist_ok=True)
            else:
                os.replace(part, folder / part.name)
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        archive.unlink()
        raise ValueError(f"{archive} was damaged ({type(error).__name__}) and is removed: run it again") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def plan_layout(names, folder):
    """Of an archive that has the layout already, below some folder: lists, metadata and images of the dataset."""
    tail = f"{data.SPLIT}/train_pairs.txt"
    tops = [name.removesuffix(tail) for name in names if name.endswith(tail)]
    tops = [top for top in tops if folder.name in PurePosixPath(top).parts] or tops[:len(tops) == 1]
    found = [(name, name.removeprefix(top)) for top in tops[:1] for name in names if name.startswith(top)]
    return [(name, place) for name, place in found if place.startswith((f"{data.SPLIT}/", "metadata_", "images/"))]


def plan_mitstates(names, folder):
    """`release_dataset/images/wet dog/1.jpg` -> `images/wet_dog/1.jpg`."""
    split = [(name, name.partition("release_dataset/images/")[2].rpartition("/")) for name in names]
    return [(name, f"images/{place.replace(' ', '_')}/{file}") for name, (place, _, file) in split if place]


def plan_utzappos(names, folder):
    """The metadata's `_image`, a path below some folder of the archive, -> `images/` and its `image`.

    Zip files that hide their encoding garble names like Børn: then the file's own name decides, if unique.
    """
    tails = {}  # every end of every path, None where several share it
    for name in names:
        parts = PurePosixPath(name).parts
        for start in range(len(parts)):
            tail = "/".join(parts[start:])
            tails[tail] = None if tail in tails else name
    problems = []
    rows = data.read_metadata(folder / f"metadata_{data.SPLIT}.t7", problems, ("image", "_image"))
    if problems:
        raise ValueError("; ".join(problems))
    places = {f"images/{data.plain(image)}": data.plain(inside) for image, inside in rows}
    found = [(tails.get(inside) or tails.get(inside.rpartition("/")[2]), place) for place, inside in places.items()]
    return [(name, place) for name, place in found if name]
