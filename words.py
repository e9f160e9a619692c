"""Word vectors for the names of states and objects, from the files people have.

It reads only the rows needed, in one pass. Legend: N names, D numbers a vector.

How a name becomes words: what the tables below hold for it (any case) replaces it, as in published
work. Then, of these readings, the first whose words all have vectors counts, and their mean is the
name's: the whole ("fire_hydrant"); parts at `_`, `.` and spaces; parts at all but letters and
digits; the same without *a, and, of, to* (published word2vec lacks them). A word is looked up as
written, in lower case, then capitalised; in text files lower case comes first, as the published
ones have no other. fastText's `.bin` makes vectors for unknown words from their n-grams: there only
lower case and the first two readings.
"""

import codecs
import gzip
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import Progress

FILES = {  # under the data root
    "word2vec": "w2v/GoogleNews-vectors-negative300.bin",
    "fasttext": "fast/cc.en.300.bin",
    "glove": "glove/glove.6B.300d.txt",
}

# The published tables: names of UT-Zappos and C-GQA that are no words, here in lower case.
EXCEPTIONS = {
    "faux.fur": "fake_fur",
    "faux.leather": "fake_leather",
    "full.grain.leather": "thick_leather",
    "hair.calf": "hair_leather",
    "patent.leather": "shiny_leather",
    "boots.ankle": "ankle_boots",
    "boots.knee.high": "knee_high_boots",
    "boots.mid-calf": "midcalf_boots",
    "shoes.boat.shoes": "boat_shoes",
    "shoes.clogs.and.mules": "clogs_shoes",
    "shoes.flats": "flats_shoes",
    "shoes.heels": "heels",
    "shoes.loafers": "loafers",
    "shoes.oxfords": "oxford_shoes",
    "shoes.sneakers.and.athletic.shoes": "sneakers",
    "trash_can": "trashcan",
    "dry-erase_board": "dry_erase_board",
    "black_and_white": "black_white",
    "eiffel_tower": "tower",
}
EXCEPTIONS_OF = {  # what differs by format
    "glove": {"nubuck": "grainy_leather"},
    "fasttext": {  # with a space: one string for the n-grams, and no mean
        "faux.fur": "fake fur",
        "faux.leather": "fake leather",
        "full.grain.leather": "thick leather",
        "hair.calf": "hairy leather",
        "patent.leather": "shiny leather",
        "boots.ankle": "ankle boots",
        "boots.knee.high": "kneehigh boots",
        "boots.mid-calf": "midcalf boots",
        "shoes.boat.shoes": "boatshoes",
        "shoes.clogs.and.mules": "clogs shoes",
        "shoes.flats": "flats shoes",
        "shoes.oxfords": "oxford shoes",
        "traffic_light": "traficlight",
    },
}
SMALL_WORDS = ("a", "and", "of", "to")  # published word2vec has no vectors for these
CHUNK = 1 << 20  # bytes read at a time: more leave the processor's cache and took twice as long
HEAD = 1 << 20  # bytes that decide on the format
ENDINGS = (".txt", ".vec", ".bin")  # of vectors among several files in a .zip


def word_vectors(names, *sources, missing="error", root="data"):
    """One vector a name: (N, sum of D) float32, the sources side by side in the order given.

    A source is "word2vec", "fasttext" or "glove" (files under `root`, see FILES, or the same with
    .gz or .zip), "random" (standard normal, D 300, seeded by the name), several joined by `+`, or
    a file: text of GloVe or fastText (blanks or tabs between the numbers, with or without a first
    line of counts), .bin of word2vec or fastText, any of these as .gz or alone in a .zip, or .npz
    with `names` and `vectors`. The content decides on the format. Of a repeated word, the first
    counts.
    `missing`: "error" lists every name without a vector; "random" (seeded, as long as the source's
    on average) or "mean" (of those found) stands in for each missing word, with one warning.
    Raises ValueError for missing words or a file that cannot be read, FileNotFoundError that names
    the file expected.

    >>> word_vectors(["old", "new"], "random").shape
    (2, 300)
    """
    if missing not in ("error", "random", "mean"):
        raise ValueError(f'missing={missing!r}: expected "error", "random" or "mean"')
    if isinstance(names, str):
        raise ValueError(f"names is {names!r}: expected a list of names, [{names!r}]")
    names = [str(name) for name in names]
    blocks = []
    complaints = []
    for source in _split(sources):
        if source == "random":
            drawn = [_random(name, 300) for name in names]
            blocks.append(np.array(drawn, np.float32).reshape(-1, 300))
            continue
        vectors, absent = _look_up(names, _find(source, root), missing)
        blocks.append(vectors)
        if absent:
            listed = ", ".join(f"{name} ({' '.join(words)})" for name, words in absent.items())
            complaints.append(f"{source} has no vectors for {len(absent)} of {len(set(names))} "
                              f"names: {listed}")
    if complaints and missing == "error":
        raise ValueError(f"{'; '.join(complaints)}: choose other vectors, or go on with "
                         "--missing random or --missing mean")
    if complaints:
        warnings.warn(f"{'; '.join(complaints)}: {missing} vectors stand in for the words in "
                      "brackets", stacklevel=2)
    return np.concatenate(blocks, axis=1)


def _split(sources):
    """Sources joined by `+` apart, unless that is the name of a file."""
    parts = []
    for source in sources:
        if Path(source).is_file():
            parts.append(source)
        else:
            parts += str(source).split("+")
    if not parts:
        raise ValueError(f"no word vectors named: expected {', '.join(FILES)}, random or a file")
    return parts


def _find(source, root):
    """The file of a source."""
    if source in FILES:
        path = Path(root) / FILES[source]
    else:
        path = Path(source)
    for candidate in (path, Path(f"{path}.gz"), Path(f"{path}.zip")):
        if candidate.is_file():
            return candidate
    if source in FILES:
        hint = (f"`python download.py --vectors {source}` fetches it, "
                "--data-root says where else to look")
    else:
        hint = f"expected {', '.join(FILES)}, random or a file of vectors"
    raise FileNotFoundError(f"no word vectors at {path} (nor {path.name}.gz or .zip): {hint}")


def lacking(*sources, root="data"):
    """What to say of the sources that are not there: a list of texts, empty if all are."""
    complaints = []
    for source in _split(sources):
        if source == "random":
            continue
        try:
            _find(source, root)
        except FileNotFoundError as error:
            complaints.append(str(error))
    if complaints:
        complaints.append("`--vectors random` does without word vectors")
    return complaints


def _random(name, dim):
    """Standard normal (dim,) float32, the same for the same name on every machine."""
    return np.random.default_rng(list(name.encode())).standard_normal(dim, dtype=np.float32)


# ---- from names to words to vectors ----


def _look_up(names, path, missing):
    """Vectors (N, D) from one file, and {name: its missing words}."""
    kind, found, dim = _read(names, path)
    known = np.array(list(found.values()), np.float32).reshape(-1, dim)
    if not np.isfinite(known).all():
        raise ValueError(f"{path} has vectors with NaN or infinite numbers")
    if names and not len(known) and missing != "error":
        raise ValueError(f"{path} has no word of {', '.join(names[:5])}, ...: nothing to take "
                         f"{missing} vectors from")

    vectors = np.zeros((len(names), dim), np.float32)
    absent = {}
    for row, name in zip(vectors, names):
        words, hits = _first_complete(_readings(name, kind), found, kind)
        lacking = [word for word, hit in zip(words, hits) if hit is None]
        if lacking:
            absent[name] = lacking
            if missing == "error":
                continue
        for place, word in enumerate(words):
            if hits[place] is None:
                hits[place] = _stand_in(word, known, missing)
        row[:] = np.mean(hits, axis=0)
    return vectors, absent


def _stand_in(word, known, missing):
    """A vector (D,) for a missing word: the mean of `known` (K, D), or a random one as long."""
    if missing == "mean":
        return known.mean(axis=0)
    dim = known.shape[1]
    return _random(word, dim) * np.linalg.norm(known, axis=1).mean() / dim**0.5


def _readings(name, kind):
    """The lists of words that may stand for a name, best first (see the head of this file)."""
    exceptions = EXCEPTIONS | EXCEPTIONS_OF.get(kind, {})
    replaced = name.lower() in exceptions
    phrase = exceptions.get(name.lower(), name)
    if kind == "fasttext" and replaced:
        return [phrase.split("_")]

    phrase = re.sub(r"\s+", "_", phrase.strip())
    parts = [part for part in re.split(r"[_.]+", phrase) if part] or [name]
    if kind == "fasttext":
        return [[phrase], parts]

    words = [word for word in re.split(r"[\W_]+", phrase) if word] or [name]
    bare = [word for word in words if word.lower() not in SMALL_WORDS] or words
    readings = [[phrase], parts, words, bare]
    if kind == "npz":
        return [[name], *readings]
    return readings


def _spellings(word, kind):
    """How a word may be written in a file of this kind, best first."""
    if kind == "fasttext":
        return [word.lower()]
    if kind in ("word2vec", "npz"):
        written = [word, word.lower()]
    else:
        written = [word.lower(), word]
    if "_" not in word:  # published work capitalises no phrases
        written.append(word.title())
    return written


def _first_complete(readings, found, kind):
    """The first reading with a vector for every word, else the last one.

    -> its words and their vectors, None for a missing one.
    """
    for words in readings:
        hits = []
        for word in words:
            present = [found[spelling] for spelling in _spellings(word, kind) if spelling in found]
            hits.append(present[0] if present else None)
        if all(hit is not None for hit in hits):
            break
    return words, hits


# ---- files and their formats ----


class Shape(NamedTuple):
    """What the first bytes of a file tell."""

    kind: str  # "glove" (text without a line of counts), "text", "word2vec", "fasttext", "npz"
    count: int | None = None  # of words, where the file says it
    dim: int | None = None  # D, where the first bytes say it
    start: int = 0  # where the first word begins


def _read(names, path):
    """One file -> its kind, {word: vector (D,)} of all that the names may need, D."""
    try:
        with _opened(path) as (file, tick):
            shape = _recognise(file.read(HEAD))
            if shape.dim == 0:
                raise ValueError("its vectors have 0 numbers, expected 1 or more")
            wanted = _wanted(names, shape.kind)
            file.seek(0)
            found, dim = READERS[shape.kind](file, wanted, tick, shape)
        if dim < 1:
            raise ValueError(f"its vectors have {dim} numbers, expected 1 or more")
    except UNREADABLE as error:
        raise ValueError(f"cannot read word vectors from {path}: {error}") from error
    return shape.kind, found, dim


UNREADABLE = (  # zipfile says by RuntimeError that a file is locked or packed in an unknown way
    ValueError, EOFError, RuntimeError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile)


def _wanted(names, kind):
    """Every word, in every spelling, that could stand for one of the names."""
    wanted = set()
    for name in names:
        for words in _readings(name, kind):
            for word in words:
                wanted.update(_spellings(word, kind))
    return wanted


@contextmanager
def _opened(path):
    """A file, unpacked on the way, and a function that shows on stderr how far it has been read."""
    megabytes = os.path.getsize(path) >> 20
    with open(path, "rb") as raw, Progress(f"reading {path.name}", megabytes, "MB") as progress:

        def tick():
            progress.update((raw.tell() >> 20) - progress.done)

        yield _unpacked(raw, path.name), tick


def _unpacked(file, name):
    """What a .gz, or a .zip of one file of vectors, holds; any other file as it is (an .npz, too).

    name: the file's own, by which the right one of several in a .zip is known.
    """
    beginning = file.read(2)
    file.seek(0)
    if beginning == b"\x1f\x8b":
        return _unpacked(gzip.open(file), name.removesuffix(".gz"))
    if beginning == b"PK":
        archive = zipfile.ZipFile(file)
        members = [member for member in archive.namelist() if _is_vector_file(member)]
        if any(member.endswith(".npy") for member in members):
            file.seek(0)
            return file
        return _unpacked(archive.open(_choose(members, name)), name)
    return file


def _is_vector_file(member):
    """Whether a member of a .zip may hold vectors: no folder, none of what systems add."""
    last = member.rpartition("/")[2]
    return bool(last) and not last.startswith(".") and not member.startswith("__MACOSX/")


def _choose(members, name):
    """Which of the members of a .zip holds the vectors."""
    if len(members) == 1:
        return members[0]
    vectors = []
    for member in members:
        last = member.rpartition("/")[2].lower()
        if last == name.lower().removesuffix(".zip"):
            return member
        if last.endswith(ENDINGS) and not last.startswith(("readme", "license")):
            vectors.append(member)
    if len(vectors) == 1:
        return vectors[0]
    listed = ", ".join(vectors or members) or "no file"
    raise ValueError(f"it holds {listed}: expected one file of vectors, unpack the one you want")


def _recognise(head):
    """A file's Shape from its first bytes."""
    if head.startswith(FASTTEXT_BEGINS):
        return Shape("fasttext")
    if head.startswith(b"PK"):
        return Shape("npz")
    start = 3 if head.startswith(b"\xef\xbb\xbf") else 0  # a byte order mark
    first, _, rest = head[start:].partition(b"\n")
    counts = re.fullmatch(rb"(\d+)\s+(\d+)\s*", first)
    if counts:
        count = int(counts[1])
        dim = int(counts[2])
        start += len(first) + 1
        # Text and word2vec's binary vectors begin alike. The bytes of one binary vector may happen
        # to read as numbers, those of most vectors do not, and no text has a zero byte.
        lines = _lines(rest)
        if b"\0" not in rest and 2 * _count_text(lines, dim) > len(lines):
            return Shape("text", count, dim, start)
        return Shape("word2vec", count, dim, start)

    # Entries with spaces in them make their lines look longer: most lines have none.
    lines = _lines(head[start:])
    widths = Counter(len(line.split()) - 1 for line in lines)
    dim = widths.most_common(1)[0][0] if lines else 0
    if dim >= 1 and 2 * _count_text(lines, dim) >= len(lines):
        return Shape("glove", None, dim, start)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is in UTF-16: save it as UTF-8")
    raise ValueError(f"it begins with {head[:20]!r}, which is neither GloVe, word2vec, fastText, "
                     ".npz nor one of these in a .gz or .zip")


def _lines(head):
    """The first 100 lines that are not empty, without a last one that may be cut off."""
    lines = head.split(b"\n")
    if len(lines) > 1:
        lines.pop()  # what follows the last line end: nothing, or part of a line
    return [line for line in lines if line.strip()][:100]


def _count_text(lines, dim):
    """How many of the lines are a word and then `dim` numbers, or fewer where a line is short."""
    count = 0
    for line in lines:
        _, *numbers = line.split()
        if numbers and all(NUMBER.fullmatch(number) for number in numbers[-dim:]):
            count += 1
    return count


NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)


def _read_text(file, wanted, tick, shape):
    """`word number number ...` a line, blanks or tabs between."""
    keys = {word.encode(): word for word in wanted}
    found = {}
    file.seek(shape.start)
    while lines := file.readlines(CHUNK):
        for line in lines:
            if b"\t" in line:
                line = line.replace(b"\t", b" ")
            word = line[:line.find(b" ")]
            if word not in keys or keys[word] in found:
                continue
            entry, *numbers = line.rsplit(None, shape.dim)
            if len(numbers) != shape.dim:
                raise ValueError(f"{word.decode()!r} has a vector of size {len(numbers)}, "
                                 f"expected {shape.dim} as of the first words")
            if entry == word:  # and no longer entry with spaces in it, as some GloVe files have
                found[keys[word]] = np.array([float(number) for number in numbers], np.float32)
        tick()
    return found, shape.dim


def _read_word2vec(file, wanted, tick, shape):
    """`word `, then D float32, with or without a newline."""
    file.seek(shape.start)
    records, _ = _scan(file, wanted, tick, shape.count, end=b" ", size=4 * shape.dim)
    found = {word: np.frombuffer(record.data, "<f4") for word, record in records.items()}
    return found, shape.dim


class Record(NamedTuple):
    """What follows a word."""

    number: int  # of the word, from 0
    data: bytes


def _scan(file, wanted, tick, count, end, size):
    """Go through `count` entries, each a word, the byte `end` and `size` bytes of data.

    -> {word: Record} of those wanted, the first of each; how many bytes all entries take.
    """
    keys = {word.encode(): word for word in wanted}
    records = {}
    buffer = b""
    at = 0  # where the next entry begins in the buffer
    passed = 0  # bytes of the file before the buffer
    for number in range(count):
        stop = buffer.find(end, at)
        if stop < 0 or stop + 1 + size > len(buffer):  # the entry is not whole: read on
            passed += at
            buffer = buffer[at:] + file.read(max(CHUNK, size))
            at = 0
            stop = buffer.find(end)
            if stop < 0 or stop + 1 + size > len(buffer):
                raise EOFError(f"it ends after {number:,} of {count:,} words: fetch it again")
            tick()
        word = buffer[at:stop].lstrip(b"\n")
        at = stop + 1 + size
        if word in keys:
            records.setdefault(keys[word], Record(number, buffer[stop + 1:at]))
    return records, passed + at


# ---- fastText's own format ----

FASTTEXT_BEGINS = struct.pack("<i", 793712314)
HEADER = struct.Struct("<2i12id3i2q")


class FastTextHeader(NamedTuple):
    """The numbers at the head of a fastText model, in the file's order."""

    magic: int
    version: int
    dim: int  # D
    window: int
    epochs: int
    min_count: int
    negatives: int
    word_ngrams: int
    loss: int
    model: int  # 1 CBOW, 2 skipgram, 3 a classifier
    buckets: int  # rows that all n-grams share, by their hash
    shortest: int  # letters of an n-gram
    longest: int
    update_rate: int
    threshold: float
    entries: int  # of the dictionary: words, then labels
    words: int
    labels: int
    tokens: int
    pruned: int  # of a model that was cut down: how many n-grams it kept; else -1


CLASSIFIER = 3


def _read_fasttext(file, wanted, tick, shape):
    """A fastText model, versions 11 and 12: header, dictionary, then the matrix's rows needed.

    A word's vector is the mean of its own row (if the dictionary has it) and those of its n-grams.
    """
    header = FastTextHeader(*HEADER.unpack(_take(file, HEADER.size)))
    if header.version not in (11, 12):
        raise ValueError(f"fastText's format has version {header.version}, expected 11 or 12")

    # The dictionary: each word, a zero byte, its count (int64) and its type (int8).
    records, length = _scan(file, wanted, tick, header.entries, end=b"\0", size=9)
    file.seek(HEADER.size + length)
    if header.pruned > 0 or _take(file, 1) != b"\0":
        raise ValueError("the fastText model is quantised (.ftz): take the full .bin")

    # The matrix: a row for each word, then one for each bucket of n-grams.
    rows, width = struct.unpack("<2q", _take(file, 16))
    if width != header.dim or rows < header.words + header.buckets:
        raise ValueError(f"its matrix is {rows} x {width}, expected "
                         f"{header.words + header.buckets} x {header.dim}")
    start = file.tell()
    rows_of = {word: _fasttext_rows(word, records.get(word), header) for word in wanted}
    matrix = {}
    for row in sorted(set().union(*rows_of.values())):  # ascending, for gzip cannot go back
        file.seek(start + row * 4 * width)
        matrix[row] = np.frombuffer(_take(file, 4 * width), "<f4")
        tick()

    found = {}
    for word, rows in rows_of.items():
        if rows:
            found[word] = np.mean([matrix[row] for row in rows], axis=0)
    return found, header.dim


def _fasttext_rows(word, record, header):
    """The matrix's rows whose mean is the word's vector; record: the dictionary's, or None."""
    rows = []
    if record is not None and record.number < header.words:  # the others are labels
        rows.append(record.number)
    elif re.search(r"[_.]", word):
        return []  # phrases are not made up from n-grams, their parts are
    old_classifier = header.version == 11 and header.model == CLASSIFIER
    if header.buckets and not old_classifier:  # which have no n-grams
        for hashed in _ngram_hashes(f"<{word}>", header.shortest, header.longest):
            rows.append(header.words + hashed % header.buckets)
    return rows


def _take(file, size):
    """Exactly `size` bytes."""
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends early: fetch it again")
    return data


def _ngram_hashes(word, shortest, longest):
    """fastText's hashes of all n-grams of `shortest` to `longest` letters, but for bare < and >."""
    last = len(word) - 1
    for begin in range(len(word)):
        for length in range(max(shortest, 1), min(longest, len(word) - begin) + 1):
            if length == 1 and begin in (0, last):
                continue
            yield _fnv(word[begin:begin + length].encode())


def _fnv(data):
    """FNV-1a, but as fastText has it: bytes from 128 on are negative numbers of 32 bits."""
    value = 2166136261
    for byte in data:
        if byte >= 128:
            byte |= 0xFFFFFF00
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


# ---- NumPy's ----

ARRAYS = {  # names -> their vectors; of a word that is in several, the first counts
    "names": "vectors", "words": "vectors", "states": "state_vectors", "objects": "object_vectors"}


def _read_npz(file, wanted, tick, shape):
    """`names` or `words` and `vectors`, or `states`, `objects` and their vectors."""
    found = {}
    dims = set()
    with np.load(file) as arrays:
        for names, vectors in ARRAYS.items():
            if names not in arrays or vectors not in arrays:
                continue
            words = _plain_array(arrays, names)
            rows = _plain_array(arrays, vectors).astype(np.float32)
            if rows.ndim != 2 or words.shape != rows.shape[:1]:
                raise ValueError(f"{vectors} has shape {rows.shape}, expected ({words.size}, D) "
                                 f"for {names} of shape {words.shape}")
            dims.add(rows.shape[1])
            for word, vector in zip(words.tolist(), rows):
                if word in wanted:
                    found.setdefault(word, vector)
        if len(dims) != 1:
            raise ValueError("expected arrays `names` and `vectors` of one D, found "
                             f"{', '.join(arrays.files)}")
    return found, dims.pop()


def _plain_array(arrays, name):
    """An array of an .npz. ValueError: it holds Python objects, whose loading could run code."""
    try:
        return np.asarray(arrays[name])  # bytes where it is no array
    except ValueError as error:
        raise ValueError(f"{name} cannot be read, as where it holds Python objects: save names as "
                         "np.array(names, str), vectors as np.array(vectors, float)") from error


READERS = {
    "glove": _read_text,
    "text": _read_text,
    "word2vec": _read_word2vec,
    "fasttext": _read_fasttext,
    "npz": _read_npz,
}


if __name__ == "__main__":
    print("words.py finds the word vectors of states and objects for other scripts; run "
          "`python compcos.py --vectors FILE` to train with vectors of your own.")
