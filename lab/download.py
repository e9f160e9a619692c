"""Datasets and word vectors from where they are published, in the layout that data.py reads.

    python download.py utzappos --data-root data --vectors word2vec
    python download.py --vectors glove

What arrives is kept as a hidden `.part` file until it is whole, so that the next run goes on where
this one ended. What is there already stays.
"""

import argparse
import gzip
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections import defaultdict
from pathlib import Path

from lab import shell
from lab.files import reading
import data
from lab.words import FILES

ADDRESSES = {
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
TIMEOUT = 60  # seconds without a byte that end a download
ARCHIVE_STARTS = b"PK", b"\x1f\x8b"  # of zip and of gzip


def download(name=None, root="data", vectors=()):
    """Fetch what is missing of the dataset `name` and of the word vectors (keys of FILES).

    All of it lies under `root`. Returns what was fetched, keys of ADDRESSES. OSError (no
    connection, no such address, disk full) and ValueError (not what was expected) name the address
    or the archive; nothing half-written is left in the layout.
    """
    root = Path(root)
    fetched = []
    if name in data.DOWNLOADED:
        folder = root / data.FOLDERS[name]
        labels = "cgqa" if name == "cgqa" else "splits"  # whose one archive holds both
        fetched += obtain(labels, folder, data.METADATA, find_layout)
        fetched += obtain(name, folder, "images", PICTURES[name])
    elif not vectors:
        raise ValueError(f"only {', '.join(data.DOWNLOADED)} can be downloaded, and --vectors "
                         f"{', '.join(FILES)}")
    for source in vectors:
        file = root / FILES[source]
        packed = Path(f"{file}.gz")
        if source == "glove":
            fetched += obtain(source, file.parent, file.name, find_glove)
        elif not file.exists() and not packed.exists():
            fetch(ADDRESSES[source], packed)
            fetched.append(source)
    return fetched


def obtain(source, folder, content, find):
    """Fetch an archive and unpack it, unless its content is in the folder.

    An archive that is there was not unpacked to its end, or put there by hand. Returns [source] or,
    if nothing was to be done, [].
    """
    archive = folder / ADDRESSES[source].rpartition("/")[2]
    if (folder / content).exists() and not archive.exists():
        return []
    fetch(ADDRESSES[source], archive)
    unpack(archive, folder, find)
    return [source]


# ---- fetching ------------------------------------------------------------------------------------


def fetch(url, file):
    """Download an archive (.zip, .gz) to `file` unless it is there, going on from an earlier start.

    ConnectionError (an OSError): not reached, broken off, or no such address; ValueError: what came
    is no archive.
    """
    if file.exists():
        return
    try:
        receive(url, file)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError,
            TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise ConnectionError(f"{url}: {why}; run it again to go on from what has come, or save "
                              f"that file as {file}") from None


def receive(url, file):
    """What `fetch` does. ConnectionError if the answer ends early."""
    with ask(url) as answer:  # for its headers alone
        size = int(answer.headers.get("Content-Length", 0))  # 0: unknown
    # Another version has another size, and another part: this one would be no start of it.
    part = file.with_name(f".{file.name}.{size}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if size and part.exists() else 0
    need = size - have
    if file.suffix != ".gz":  # what it unpacks to, at least
        need += size
    free = shutil.disk_usage(file.parent).free
    if free < need:
        raise OSError(f"{file.parent}: {need:,} bytes are needed, {free:,} are free")
    if have < size or size == 0:
        with ask(url, Range=f"bytes={have}-") as answer:
            is_rest = answer.status == 206  # else it is the whole
            save(answer, part, "ab" if is_rest and have else "wb", size)
    have = part.stat().st_size
    if size and have != size:
        raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
    with open(part, "rb") as begun:
        start = begun.read(9)
    if not start.startswith(ARCHIVE_STARTS):
        part.unlink()
        raise ValueError(f"{url} gave no archive (it begins {start!r}): see it in a browser, and "
                         f"save the archive as {file}")
    os.replace(part, file)


def ask(url, **headers):
    """Open an address."""
    request = urllib.request.Request(url, headers={"User-Agent": "compcos", **headers})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def save(answer, part, mode, size):
    """Write an answer to `part`, of which there will be `size` bytes (0: unknown)."""
    with open(part, mode) as out, shell.Progress(part.name, size // MB, "MB") as progress:
        block = answer.read1(MB)
        while block:
            out.write(block)
            progress.update(out.tell() // MB - progress.done)
            block = answer.read1(MB)


# ---- unpacking -----------------------------------------------------------------------------------


def unpack(archive, folder, find):
    """Unpack an archive into a folder, and remove it.

    All is unpacked beside the archive first; then what `find(stage, folder)` -> {place: file} asks
    for takes its place. A kill leaves the archive, and the next run begins anew. ValueError: it is
    damaged or another archive; nothing was unpacked.
    """
    stage = archive.with_name(f".{archive.name}.unpacked.part")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        with reading(archive, "if it is damaged, remove it and run this again"):
            extract(archive, stage)
        files = find(stage, folder)
        if not files:
            raise ValueError(f"{archive} is not the archive meant: remove it, and run this again")
        for place in files:
            if ".." in Path(place).parts:
                raise ValueError(f"{archive}: {place} leads out of {folder}: nothing was unpacked")
        for place, file in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, folder / place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    archive.unlink()


def extract(archive, stage):
    """Unpack a .zip or .tar.gz into a new folder, and nothing of it elsewhere."""
    shell.print_status(f"unpacking {archive}")
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            file.extractall(stage)
        return
    with gzip.open(archive) as whole, tarfile.open(fileobj=whole) as file:
        file.extractall(stage, filter="data")
        whole.read()  # to the sum at the end, where tarfile does not come


def files_below(folder):
    """The plain files, no links, below a folder, and below none that macOS adds."""
    return [path for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and "__MACOSX" not in path.parts]


# ---- what of an archive goes where ---------------------------------------------------------------


def find_glove(stage, folder):
    """The vectors of 300 numbers."""
    name = Path(FILES["glove"]).name
    return {name: path for path in files_below(stage) if path.name == name}


def find_layout(stage, folder):
    """Of an archive that has the layout already, below some folder: lists, metadata, images."""
    tops = [path.parent for path in stage.rglob(data.SPLIT)]
    if len(tops) > 1:
        tops = [top for top in tops if top.name == folder.name]
    files = {}
    for top in tops:
        for path in files_below(top):
            place = path.relative_to(top).as_posix()
            if place.startswith((f"{data.SPLIT}/", "metadata_", "images/")):
                files[place] = path
    return files


def find_mitstates(stage, folder):
    """`release_dataset/images/wet dog/1.jpg` -> `images/wet_dog/1.jpg`."""
    files = {}
    for path in files_below(stage / "release_dataset/images"):
        files[f"images/{path.parent.name.replace(' ', '_')}/{path.name}"] = path
    return files


def find_utzappos(stage, folder):
    """The metadata's `_image`, a path below some folder of the archive, -> `images/` + its `image`.

    Zip files that hide their encoding garble names like Børn: then the file's own name decides,
    if unique.
    """
    by_name = defaultdict(list)
    for path in files_below(stage):
        by_name[path.name].append(path)
    files = {}
    for image, inside in data.read_metadata(folder / data.METADATA, ("image", "_image")):
        inside = data.normalize_path(inside)
        found = by_name[inside.rpartition("/")[2]]
        if len(found) > 1:
            found = [path for path in found if path.as_posix().endswith(f"/{inside}")]
        if len(found) == 1:
            files[f"images/{data.normalize_path(image)}"] = found[0]
    return files


PICTURES = {"utzappos": find_utzappos, "mitstates": find_mitstates, "cgqa": find_layout}


@shell.command
def main(argv=None):
    """Fetch a dataset, word vectors, or both."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help=f"{', '.join(data.DOWNLOADED)}; of any other, which is there already, "
                             "only --vectors are fetched")
    parser.add_argument("--data-root", default="data", metavar="DIR",
                        help="where datasets and word vectors go (default: data)")
    parser.add_argument("--vectors", nargs="+", default=[], choices=list(FILES), metavar="NAME",
                        help="also these word vectors: word2vec (1.5 GB), fasttext (4.2 GB), "
                             "glove (0.8 GB)")
    options = parser.parse_args(argv)
    fetched = download(options.name, options.data_root, options.vectors)
    print(f"fetched {', '.join(fetched) or 'nothing'}; all of it is in {options.data_root}")


if __name__ == "__main__":
    main()
