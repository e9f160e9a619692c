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
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import common
import data

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
DATASETS = "utzappos", "mitstates", "cgqa"
VECTORS = {  # where each lies under --data-root
    "word2vec": "w2v/GoogleNews-vectors-negative300.bin.gz",
    "fasttext": "fast/cc.en.300.bin.gz",
    "glove": "glove/glove.6B.300d.txt",
}
SIZES = "word2vec (1.5 GB), fasttext (4.2 GB), glove (0.8 GB)"
MB = 2**20
TIMEOUT = 60  # seconds without a byte that end a try
ARCHIVE_STARTS = b"PK", b"\x1f\x8b"  # of zip and of gzip
DAMAGE = zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError


class Job(NamedTuple):
    """One file to fetch."""

    source: str             # a key of ADDRESSES
    file: Path              # where it is saved
    plan: Callable | None   # (names in the archive, folder) -> [(name, place)]; None: kept as it is


def download(name=None, root="data", vectors=()):
    """Fetch what is missing of the dataset `name` and of the word vectors (keys of VECTORS).

    All of it lies under `root`. Raises OSError (no connection, no such address, disk full) or
    ValueError (not what was expected), leaving nothing half-written in the layout.
    """
    root = Path(root)
    jobs = []
    if name in DATASETS:
        jobs += dataset_jobs(name, root / data.FOLDERS[name])
    elif not vectors:
        problem = "nothing is named" if name is None else f"no address for {name!r}"
        raise ValueError(f"{problem}: only {', '.join(DATASETS)} can be downloaded, "
                         f"and --vectors {', '.join(VECTORS)}")
    for source in vectors:
        jobs += vector_jobs(source, root)
    for done, job in enumerate(jobs):
        try:
            obtain(job)
        except ConnectionError as error:
            raise ConnectionError(f"{error}\n{by_hand(jobs[done:])}") from None
    return jobs


def dataset_jobs(name, folder):
    """What a dataset's folder lacks, and what an earlier run had begun to unpack into it."""
    plans = {"utzappos": plan_utzappos, "mitstates": plan_mitstates, "cgqa": plan_layout}
    labels = Job("splits", archive_of("splits", folder), plan_layout)
    pictures = Job(name, archive_of(name, folder), plans[name])
    lacks_labels = not (folder / data.METADATA).exists()
    lacks_pictures = not (folder / "images").is_dir()
    if name == "cgqa":  # one archive holds both
        lacks_pictures = lacks_pictures or lacks_labels
        lacks_labels = False
    jobs = []
    if lacks_labels or stage_of(labels.file).exists():
        jobs.append(labels)
    if lacks_pictures or stage_of(pictures.file).exists():
        jobs.append(pictures)
    return jobs


def vector_jobs(source, root):
    """The file of word vectors, unless it is there, packed or not."""
    file = root / VECTORS[source]
    if file.exists() or file.with_name(file.name.removesuffix(".gz")).exists():
        return []
    if file.suffix == ".gz":
        return [Job(source, file, None)]
    return [Job(source, archive_of(source, file.parent), partial(plan_one_file, wanted=file.name))]


def archive_of(source, folder):
    """Where an archive is saved: under its own name in the folder that it is unpacked into."""
    return folder / ADDRESSES[source].rpartition("/")[2]


def by_hand(jobs):
    """What to do where there is no connection."""
    lines = ["without a connection here, fetch elsewhere, put in place, and run this again:"]
    for job in jobs:
        lines.append(f"  {ADDRESSES[job.source]}\n    as {job.file}")
    return "\n".join(lines)


def obtain(job):
    """Fetch a file; if it is an archive to unpack, do that and remove it."""
    url = ADDRESSES[job.source]
    if job.plan is None:
        fetch(url, job.file)
        return
    fetch(url, job.file, copies=2)
    unpack(job.file, job.file.parent, job.plan)
    job.file.unlink()


# ---- fetching ------------------------------------------------------------------------------------


def fetch(url, file, *, copies=1, timeout=TIMEOUT, tries=4, wait=1, starts=ARCHIVE_STARTS):
    """Download an archive (.zip, .gz) to `file` unless it is there, going on from an earlier try.

    copies: how many files of this size the disk must have room for; timeout: seconds without a byte
    that end a try; wait: seconds before the second try, doubled before each further one; starts:
    the beginnings that such a file may have, bytes.
    ConnectionError (an OSError): not reached in `tries`; OSError: no such address, or no room;
    ValueError: what came is no archive.
    """
    file = Path(file)
    if file.exists():
        return
    for attempt in range(tries):
        if attempt > 0:
            time.sleep(wait * 2 ** (attempt - 1))
        try:
            receive(url, file, copies, timeout, starts)
            return
        except urllib.error.HTTPError as error:
            why = str(error)
            if error.code < 500:  # no use to try again
                raise OSError(f"{url}: {why}; if it has moved, save that file as {file}") from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError,
                TimeoutError) as error:
            why = str(error) or type(error).__name__
    raise ConnectionError(f"{url}: {why}; run it again to go on from what has come")


def receive(url, file, copies, timeout, starts):
    """One try of `fetch`. ConnectionError if the answer ends early."""
    with ask(url, timeout) as answer:
        file.parent.mkdir(parents=True, exist_ok=True)
        size = int(answer.headers.get("Content-Length", 0))  # 0: unknown
        part = part_of(file, url, size, answer.headers)
        have = 0
        if size and part.exists() and part.stat().st_size <= size:
            have = part.stat().st_size
        ensure_room(file.parent, copies * size - have)
        if have == 0:
            save(answer, part, 0, size)
    if 0 < have < size:
        go_on(url, part, have, size, timeout)
    have = part.stat().st_size
    if size and have != size:
        raise ConnectionError(f"the connection ended after {have:,} of {size:,} bytes")
    check_start(url, part, file, starts)
    os.replace(part, file)


def part_of(file, url, size, headers):
    """Where the bytes of this version of the file gather: another version's are no start."""
    version = f"{url} {size} {headers.get('ETag', headers.get('Last-Modified'))}"
    return file.with_name(f".{file.name}.{zlib.crc32(version.encode()):08x}.part")


def go_on(url, part, have, size, timeout):
    """Ask for what comes after the first `have` of `size` bytes.

    A server may answer with the whole, or (wrongly) with another range: then all is asked for anew.
    """
    with ask(url, timeout, Range=f"bytes={have}-") as answer:
        given = answer.headers.get("Content-Range", "").lower()
        if answer.status == 206 and given.startswith(f"bytes {have}-"):
            save(answer, part, have, size)
            return
    with ask(url, timeout) as answer:
        save(answer, part, 0, size)


def check_start(url, part, file, starts):
    """ValueError, and no part left, if what came begins with none of `starts`."""
    with open(part, "rb") as begun:
        start = begun.read(200)
    if start.startswith(starts):
        return
    part.unlink()
    what = f"a file that begins {start[:12]!r}"
    if start.lstrip()[:1] == b"<":
        what = "an HTML page"
    raise ValueError(f"{url} gave {what}, not an archive: see it in a browser, and save the "
                     f"archive as {file}")


def ask(url, timeout, **headers):
    """Open an address."""
    request = urllib.request.Request(url, headers={"User-Agent": "compcos", **headers})
    return urllib.request.urlopen(request, timeout=timeout)


def save(answer, part, have, size):
    """Write an answer to `part` after the first `have` of `size` bytes (0: unknown)."""
    mode = "ab" if have else "wb"
    with open(part, mode) as out, common.Progress(part.name, size // MB, "MB") as progress:
        progress.update(have // MB)
        block = answer.read1(MB)
        while block:
            out.write(block)
            progress.update(out.tell() // MB - progress.done)
            block = answer.read1(MB)


def ensure_room(folder, need):
    """OSError unless the disk of `folder` has `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{folder}: {need / MB:,.0f} MB are needed, {free / MB:,.0f} MB are free")


# ---- unpacking -----------------------------------------------------------------------------------


@contextmanager
def opened(archive):
    """The plain files, neither folders nor links, of a .zip or .tar.gz.

    Yields name -> (size, function that opens it).
    """
    files = {}
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                    files[info.filename] = info.file_size, partial(file.open, info)
            yield files
        return
    with gzip.open(archive) as whole:
        while whole.read(MB):  # to the checksum at the end, where tarfile does not come
            pass
    with tarfile.open(archive) as file:
        for info in file:
            if info.isfile():
                files[info.name] = info.size, partial(file.extractfile, info)
        yield files


def stage_of(archive):
    """The folder that an archive is unpacked into first.

    It goes when all has been moved out of it, so one that is there says: unpack again.
    """
    return archive.with_name(f".{archive.name}.unpacked.part")


def unpack(archive, folder, plan):
    """Unpack the files that plan(names, folder) -> [(name, place under folder)] asks for.

    All of them are unpacked or none; a damaged archive is removed. ValueError says what is wrong.
    """
    stage = stage_of(archive)
    shutil.rmtree(stage, ignore_errors=True)
    whole = False
    try:
        copy_out(archive, folder, plan, stage)
        whole = True
    except DAMAGE as error:
        archive.unlink()
        raise ValueError(f"{archive} was damaged ({type(error).__name__}) and is removed: "
                         "run it again") from None
    finally:
        if not whole:
            shutil.rmtree(stage, ignore_errors=True)
    move_in(stage, folder)


def copy_out(archive, folder, plan, stage):
    """Write the files of an archive that the plan asks for below `stage`."""
    with opened(archive) as files:
        wanted = plan(list(files), folder)
        check_places(archive, wanted, files)
        ensure_room(folder, sum(files[name][0] for name, _ in wanted))
        with common.Progress(f"unpacking {archive.name}", len(wanted), "files") as progress:
            for name, place in wanted:
                (stage / place).parent.mkdir(parents=True, exist_ok=True)
                try:
                    with files[name][1]() as source, open(stage / place, "wb") as out:
                        shutil.copyfileobj(source, out)
                except (NotImplementedError, RuntimeError) as error:  # of zipfile
                    raise ValueError(f"{archive}: {name} is encrypted or packed by an unknown "
                                     f"method ({error}); nothing was unpacked, do it by another "
                                     f"program and put the files into {folder}") from None
                progress.update()


def check_places(archive, wanted, files):
    """ValueError if the plan found nothing, or names that lead out of the folder."""
    outside = []
    for _, place in wanted:
        if place.startswith("/") or ".." in place.replace("\\", "/").split("/"):
            outside.append(place)
    if outside:
        found = f"names outside the folder ({data.some(outside)})"
    elif not wanted:
        found = f"only {data.some(files)}"
    else:
        return
    raise ValueError(f"{archive} holds {found}: nothing was unpacked, it is not the archive meant")


def move_in(stage, folder):
    """Move all files below `stage` to the same places below `folder`, and remove it."""
    for file in sorted(stage.rglob("*")):
        if file.is_file():
            place = folder / file.relative_to(stage)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    shutil.rmtree(stage)


# ---- what of an archive goes where ---------------------------------------------------------------


def plan_one_file(names, folder, wanted):
    """The one file of this name."""
    return [(name, name) for name in names if name == wanted]


def plan_layout(names, folder):
    """Of an archive that has the layout already, below some folder: lists, metadata, images."""
    tail = f"{data.SPLIT}/train_pairs.txt"
    tops = [name.removesuffix(tail) for name in names if name.endswith(tail)]
    of_this_name = [top for top in tops if folder.name in PurePosixPath(top).parts]
    if of_this_name:
        top = of_this_name[0]
    elif len(tops) == 1:
        top = tops[0]
    else:
        return []
    found = []
    for name in names:
        place = name.removeprefix(top)
        if name.startswith(top) and place.startswith((f"{data.SPLIT}/", "metadata_", "images/")):
            found.append((name, place))
    return found


def plan_mitstates(names, folder):
    """`release_dataset/images/wet dog/1.jpg` -> `images/wet_dog/1.jpg`."""
    found = []
    for name in names:
        below = name.partition("release_dataset/images/")[2]
        noun_folder, _, file = below.rpartition("/")
        if noun_folder and not name.startswith("__MACOSX"):
            found.append((name, f"images/{noun_folder.replace(' ', '_')}/{file}"))
    return found


def plan_utzappos(names, folder):
    """The metadata's `_image`, a path below some folder of the archive, -> `images/` + its `image`.

    Zip files that hide their encoding garble names like Børn: then the file's own name decides,
    if unique.
    """
    by_ending = {}  # every end of every path, None where several share it
    for name in names:
        parts = PurePosixPath(name).parts
        for start in range(len(parts)):
            ending = "/".join(parts[start:])
            by_ending[ending] = None if ending in by_ending else name
    problems = []
    rows = data.read_metadata(folder / data.METADATA, problems, ("image", "_image"))
    if problems:
        raise ValueError("; ".join(problems))
    found = {}  # place -> name
    for image, inside in rows:
        inside = data.plain(inside)
        name = by_ending.get(inside) or by_ending.get(inside.rpartition("/")[2])
        if name:
            found[f"images/{data.plain(image)}"] = name
    return [(name, place) for place, name in found.items()]


@common.command
def main(argv=None):
    """Fetch a dataset, word vectors, or both."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(DATASETS)}; of any "
                        "other, which is there already, only --vectors are fetched")
    parser.add_argument("--data-root", default="data", metavar="DIR",
                        help="where datasets and word vectors go (default: data)")
    parser.add_argument("--vectors", nargs="+", default=[], choices=list(VECTORS), metavar="NAME",
                        help=f"also these word vectors: {SIZES}")
    options = parser.parse_args(argv)
    jobs = download(options.name, options.data_root, options.vectors)
    fetched = ", ".join(job.source for job in jobs)
    print(f"fetched {fetched}" if jobs else f"all of it is in {options.data_root} already")
    if options.name:
        print(f"next: python data.py {options.name}{data.data_root_option(options.data_root)}")


if __name__ == "__main__":
    main()
