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
import re
import struct
import warnings
from pathlib import Path

import numpy as np

from lab.files import reading


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
KINDS = ("give text of GloVe or fastText in UTF-8, .bin of word2vec, .bin of fastText, or .npz of "
         "`names` (N,) and `vectors` (N, D), whole; each may be .gz")
CHUNK = 1 << 20  # bytes read at a time: more leave the processor's cache and took twice as long
HEAD = 1 << 20  # bytes that decide on the format


def word_vectors(names, *sources, missing="error", root="data"):
    """One vector a name: (N, sum of D) float32, the sources side by side in the order given.

    A source is "word2vec", "fasttext" or "glove" (files under `root`, see FILES, or the same with
    .gz), "random" (standard normal, D 300, seeded by the name), or a file:
    text of GloVe or fastText (blanks or tabs between the numbers, with or without a first line of
    counts), .bin of word2vec or fastText, or .npz with `names` and `vectors`, any of these as .gz.
    The content decides on the format. Of a repeated word, the first counts.
    `missing`: "error" lists every name without a vector; "random" (seeded, as long as the source's
    on average) or "mean" (of those found) stands in for each missing word, with one warning.
    Raises ValueError for missing words or a file that cannot be read, FileNotFoundError that names
    the files expected, before any is read.

    >>> word_vectors(["old", "new"], "random").shape
    (2, 300)
    """
    if missing not in ("error", "random", "mean"):
        raise ValueError(f'missing={missing!r}: expected "error", "random" or "mean"')
    names = [str(name) for name in names]
    blocks = []
    complaints = []
    for source, file in zip(sources, _find(sources, root)):
        if file is None:
            blocks.append(np.stack([_random(name, 300) for name in names]))
            continue
        vectors, absent = _look_up(names, file, missing)
        blocks.append(vectors)
        if absent:
            listed = ", ".join(f"{name} ({' '.join(words)})" for name, words in absent.items())
            complaints.append(f"{source} has no vectors for {len(absent)} of {len(set(names))} "
                              f"names: {listed}")
    if complaints:
        complaint = "; ".join(complaints)
        if missing == "error":
            raise ValueError(f"{complaint}: choose other vectors, or go on with --missing random "
                             "or --missing mean")
        warnings.warn(f"{complaint}: {missing} vectors stand in for the words in brackets",
                      stacklevel=2)
    return np.concatenate(blocks, axis=1)


def _find(sources, root):
    """The file of each source, None of "random". FileNotFoundError names all that are not there."""
    files = []
    lacking = []
    for source in sources:
        path = Path(source)
        if source in FILES:
            path = Path(root, FILES[source])
        there = [file for file in (path, Path(f"{path}.gz")) if file.is_file()]
        if source == "random":
            files.append(None)
        elif there:
            files.append(there[0])
        else:
            lacking.append(f"{path} (nor {path.name}.gz)")
    if lacking:
        raise FileNotFoundError(f"no word vectors at {', '.join(lacking)}: expected a file of "
                                f"vectors; {', '.join(FILES)}, which `python download.py --vectors "
                                "NAME` fetches to where --data-root looks; or random, without any")
    return files


def _random(name, dim):
    """Standard normal (dim,) float32, the same for the same name on every machine."""
    return np.random.default_rng(list(name.encode())).standard_normal(dim, dtype=np.float32)


# ---- from names to words to vectors ----


def _look_up(names, path, missing):
    """Vectors (N, D) from one file, and {name: its missing words}."""
    kind, found, dim = _read(names, path)
    known = np.array(list(found.values())).astype(np.float32).reshape(-1, dim)
    found = dict(zip(found, known))
    if not np.isfinite(known).all():
        raise ValueError(f"{path} has vectors with NaN or with numbers beyond float32 (3.4e38)")
    if not len(known) and missing != "error":
        raise ValueError(f"{path} has no word of these names: nothing to take {missing} vectors "
                         "from")

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
    phrase = exceptions.get(name.lower(), name)
    if kind == "fasttext" and phrase != name:
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
            written = next((way for way in _spellings(word, kind) if way in found), None)
            hits.append(found.get(written))
        if all(hit is not None for hit in hits):
            break
    return words, hits


# ---- files and their formats ----


def _read(names, path):
    """One file -> its kind, {word: vector (D,)} of all that the names may need, D.

    The kinds: "glove" (text without a line of counts), "text", "word2vec", "fasttext", "npz".
    """
    with reading(path, KINDS), _opened(path) as file:
        kind, count, dim, start = _recognise(file.read(HEAD))
        file.seek(start)
        wanted = set()
        for name in names:
            for words in _readings(name, kind):
                for word in words:
                    wanted.update(_spellings(word, kind))
        if kind == "npz":
            found, dim = _read_npz(file, wanted)
        elif kind == "fasttext":
            found, dim = _read_fasttext(file, wanted)
        elif kind == "word2vec":
            found = _read_word2vec(file, wanted, count, dim)
        else:
            found = _read_text(file, wanted, dim)
    return kind, found, dim


def _opened(path):
    """A file, unpacked on the way if it is gzip."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_packed else open(path, "rb")


def _recognise(head):
    """From a file's first bytes: its kind, how many words, D, and where the first word begins.

    The number of words and D are None where the first bytes do not say them.
    """
    if head.startswith(FASTTEXT_BEGINS):
        return "fasttext", None, None, 0
    if head.startswith(b"PK"):
        return "npz", None, None, 0
    start = 3 if head.startswith(codecs.BOM_UTF8) else 0
    lines = head[start:].split(b"\n")
    counts = re.fullmatch(rb"(\d+)\s+([1-9]\d*)\s*", lines[0])
    if counts:  # text and word2vec's binary vectors begin alike
        kind = "text" if _is_text(head) else "word2vec"
        return kind, int(counts[1]), int(counts[2]), start + len(lines[0]) + 1

    # Some entries have spaces in them, but never the first one.
    if not re.fullmatch(rb".+\s[-+.\de]+\s*", lines[0]) or not _is_text(head):
        raise ValueError(f"it begins with {head[:20]!r}")
    return "glove", None, len(lines[0].split()) - 1, start


def _is_text(head):
    """Whether the first bytes of a file, which may end within a letter, are UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _read_text(file, wanted, dim):
    """`word number number ...` a line, blanks or tabs between -> {word: vector (D,)}."""
    keys = {word.encode(): word for word in wanted}
    found = {}
    for line in file:
        line = line.replace(b"\t", b" ")
        word = line[:line.find(b" ")]
        if word not in keys or keys[word] in found:
            continue
        entry, *numbers = line.rsplit(None, dim)
        if len(numbers) != dim:
            raise ValueError(f"{word.decode()!r} has {len(numbers)} numbers, the first word {dim}")
        if entry == word:  # and no longer entry with spaces in it, as some GloVe files have
            found[keys[word]] = np.array([float(number) for number in numbers])
    return found


def _read_word2vec(file, wanted, count, dim):
    """`word `, then D float32, with or without a newline -> {word: vector (D,)}."""
    entries, _ = _scan(file, wanted, count, end=b" ", size=4 * dim)
    return {word: np.frombuffer(data, "<f4") for word, (_, data) in entries.items()}


def _scan(file, wanted, count, end, size):
    """Go through `count` entries, each a word, the byte `end` and `size` bytes of data.

    -> {word: (its number, its data)} of those wanted, the first of each; how many bytes all take.
    """
    keys = {word.encode(): word for word in wanted}
    entries = {}
    buffer = b""
    at = 0  # where the next entry begins in the buffer
    passed = 0  # bytes of the file before the buffer
    for number in range(count):
        stop = buffer.find(end, at)
        while stop < 0 or stop + size >= len(buffer):  # the entry is not whole: read on
            more = file.read(CHUNK)
            if not more:
                raise EOFError(f"it ends after {number:,} of {count:,} words")
            passed += at
            buffer = buffer[at:] + more
            at = 0
            stop = buffer.find(end)
        word = buffer[at:stop].lstrip(b"\n")
        at = stop + 1 + size
        if word in keys:
            entries.setdefault(keys[word], (number, buffer[stop + 1:at]))
    return entries, passed + at


# ---- fastText's own format ----

FASTTEXT_BEGINS = struct.pack("<i", 793712314)
HEADER = struct.Struct("<4x2i24x4i12x2i12xq")  # what is of no use here is passed over


def _read_fasttext(file, wanted):
    """A fastText model, versions 11 and 12: header, dictionary, then the matrix's rows needed.

    A word's vector is the mean of its own row (if the dictionary has it) and those of its n-grams.
    -> {word: vector (D,)}, D.
    """
    # n-grams of `shortest` to `longest` letters share `buckets` rows, by their hash. Of the
    # dictionary's entries the first ones are words, then come labels. `pruned` is, of a model that
    # was cut down, how many n-grams it kept, else -1.
    (version, dim, model, buckets, shortest, longest,
     entry_count, word_count, pruned) = HEADER.unpack(_take(file, HEADER.size))
    if version not in (11, 12) or model == 3:
        raise ValueError(f"version {version} of fastText's format, model {model}: expected version "
                         "11 or 12, and no classifier (3)")

    # The dictionary: each word, a zero byte, its count (int64) and its type (int8).
    entries, length = _scan(file, wanted, entry_count, end=b"\0", size=9)
    file.seek(HEADER.size + length)
    if pruned > 0 or _take(file, 1) != b"\0":
        raise ValueError("the fastText model is quantised (.ftz): take the full .bin")

    # The matrix: a row for each word, then one for each bucket of n-grams.
    height, width = struct.unpack("<2q", _take(file, 16))
    if width != dim or height < word_count + buckets:
        raise ValueError(f"its matrix is {height} x {width}")
    start = file.tell()
    rows_of = {}
    for word in wanted:
        rows = []
        number, _ = entries.get(word, (word_count, None))
        if number < word_count:  # it is in the dictionary, and no label
            rows.append(number)
        # Phrases are not made up from n-grams, their parts are.
        if rows or not re.search(r"[_.]", word):
            for hashed in _ngram_hashes(f"<{word}>", shortest, longest):
                rows.append(word_count + hashed % buckets)
        rows_of[word] = rows
    matrix = {}
    for row in sorted(set().union(*rows_of.values())):  # ascending, for gzip cannot go back
        file.seek(start + row * 4 * width)
        matrix[row] = np.frombuffer(_take(file, 4 * width), "<f4")

    found = {}
    for word, rows in rows_of.items():
        if rows:
            found[word] = np.mean([matrix[row] for row in rows], axis=0)
    return found, dim


def _take(file, size):
    """Exactly `size` bytes."""
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends early")
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


def _read_npz(file, wanted):
    """The arrays `names` and `vectors` -> {word: vector (D,)}, D."""
    with np.load(file) as arrays:
        words = arrays["names"].tolist()
        vectors = arrays["vectors"]
    _, dim = vectors.shape
    found = {}
    for word, vector in zip(words, vectors, strict=True):
        if word in wanted:
            found.setdefault(word, vector)
    return found, dim
