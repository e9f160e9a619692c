"""Word vectors for the names of states and objects, from the files people have: only the rows needed, in one pass.

Legend: N names, D numbers a vector.

How a name becomes words: what the tables below hold for it (any case) replaces it, as in published work. Then, of these
readings, the first whose words all have vectors counts, and their mean is the name's: the whole ("fire_hydrant"); parts
at `_`, `.` and spaces; parts at all but letters and digits; the same without *a, and, of, to* (published word2vec lacks
them). A word is looked up as written, in lower case, then capitalised; in text files lower case comes first, as the
published ones have no other. fastText's `.bin` makes vectors for unknown words from their n-grams: there only lower
case and the first two readings.
"""

import gzip
import os
import re
import struct
import warnings
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common import Progress

FILES = {  # under the data root
    "word2vec": "w2v/GoogleNews-vectors-negative300.bin",
    "fasttext": "fast/cc.en.300.bin",
    "glove": "glove/glove.6B.300d.txt",
}

# The published tables: names of UT-Zappos and C-GQA that are no words, here in lower case.
EXCEPTIONS = {
    "faux.fur": "fake_fur", "faux.leather": "fake_leather", "full.grain.leather": "thick_leather",
    "hair.calf": "hair_leather", "patent.leather": "shiny_leather",
    "boots.ankle": "ankle_boots", "boots.knee.high": "knee_high_boots", "boots.mid-calf": "midcalf_boots",
    "shoes.boat.shoes": "boat_shoes", "shoes.clogs.and.mules": "clogs_shoes", "shoes.flats": "flats_shoes",
    "shoes.heels": "heels", "shoes.loafers": "loafers", "shoes.oxfords": "oxford_shoes",
    "shoes.sneakers.and.athletic.shoes": "sneakers",
    "trash_can": "trashcan", "dry-erase_board": "dry_erase_board", "black_and_white": "black_white",
    "eiffel_tower": "tower",
}
EXCEPTIONS_OF = {  # what differs by format
    "glove": {"nubuck": "grainy_leather"},
    "fasttext": {  # with a space: one string for the n-grams, and no mean
        "faux.fur": "fake fur", "faux.leather": "fake leather", "full.grain.leather": "thick leather",
        "hair.calf": "hairy leather", "patent.leather": "shiny leather",
        "boots.ankle": "ankle boots", "boots.knee.high": "kneehigh boots", "boots.mid-calf": "midcalf boots",
        "shoes.boat.shoes": "boatshoes", "shoes.clogs.and.mules": "clogs shoes", "shoes.flats": "flats shoes",
        "shoes.oxfords": "oxford shoes", "traffic_light": "traficlight",
    },
}
CHUNK = 1 << 20  # bytes read at a time: larger ones leave the processor's cache and took twice as long
FASTTEXT = struct.pack("<i", 793712314)  # how its models begin


def word_vectors(names, *sources, missing="error", root="data"):
    """One vector a name: (N, sum of D) float32, the sources side by side in the order given.

    A source is "word2vec", "fasttext" or "glove" (files under `root`, see FILES, or the same with .gz), "random"
    (standard normal, D 300, seeded by the name), several joined by `+`, or a file: text of GloVe or fastText, .bin of
    word2vec or fastText, any of these as .gz, or .npz with `names` and `vectors`. The content decides on the format.
    `missing`: "error" lists every name without a vector; "random" (seeded, as long as the source's on average) or
    "mean" (of those found) stands in for each missing word, with one warning.
    Raises ValueError for missing words or a file that cannot be read, FileNotFoundError that names the file expected.

    >>> word_vectors(["old", "new"], "random").shape
    (2, 300)
    """
    if missing not in ("error", "random", "mean"):
        raise ValueError(f'missing={missing!r}: expected "error", "random" or "mean"')
    if isinstance(names, str):
        raise ValueError(f"names is {names!r}: expected a list of names, [{names!r}]")
    names = [str(name) for name in names]
    blocks, lacks = [], []
    for source in _split(sources):
        if source == "random":
            blocks.append(np.array([_random(name, 300) for name in names], np.float32).reshape(-1, 300))
            continue
        vectors, absent = _look_up(names, _find(source, root), missing)
        blocks.append(vectors)
        if absent:
            listed = ", ".join(f"{name} ({' '.join(words)})" for name, words in absent.items())
            lacks.append(f"{source} has no vectors for {len(absent)} of {len(set(names))} names: {listed}")
    if lacks and missing == "error":
        raise ValueError("; ".join(lacks) + ": choose other vectors, or go on with --missing random or --missing mean")
    if lacks:
        warnings.warn(f"{'; '.join(lacks)}: {missing} vectors stand in for the words in brackets", stacklevel=2)
    return np.concatenate(blocks, axis=1)


def _split(sources):
    """Sources joined by `+` apart, unless that is the name of a file."""
    parts = [part for source in sources for part in ([source] if Path(source).is_file() else str(source).split("+"))]
    if not parts:
        raise ValueError(f"no word vectors named: expected {', '.join(FILES)}, random or a file")
    return parts


def _find(source, root):
    """The file of a source."""
    path = Path(root) / FILES[source] if source in FILES else Path(source)
    for candidate in (path, Path(f"{path}.gz")):
        if candidate.is_file():
            return candidate
    if source in FILES:
        hint = f"`python data.py DATASET --download --vectors {source}` fetches it, --data-root says where else to look"
    else:
        hint = f"expected {', '.join(FILES)}, random or a file of vectors"
    raise FileNotFoundError(f"no word vectors at {path} (nor {path.name}.gz): {hint}")


def _random(name, dim):
    """Standard normal (dim,) float32, the same for the same name on every machine."""
    return np.random.default_rng(list(name.encode())).standard_normal(dim, dtype=np.float32)


def _look_up(names, path, missing):
    """Vectors (N, D) from one file, and {name: its missing words}."""
    try:
        with _opened(path) as (file, tick):
            kind, *shape = _recognise(file.read(CHUNK))
            file.seek(0)
            readings = {name: _readings(name, kind) for name in names}
            wanted = {s for r in readings.values() for words in r for word in words for s in _spellings(word, kind)}
            found, dim = READERS[kind](file, wanted, tick, *shape)
            if dim < 1:
                raise ValueError(f"its vectors have {dim} numbers, expected 1 or more")
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read word vectors from {path}: {error}") from error
    known = np.array(list(found.values()), np.float32).reshape(-1, dim)
    if not np.isfinite(known).all():
        raise ValueError(f"{path} has vectors with NaN or infinite numbers")
    if names and not len(known) and missing != "error":
        raise ValueError(f"{path} has no word of {', '.join(names[:5])}, ...: nothing to take {missing} vectors from")
    vectors, absent = np.zeros((len(names), dim), np.float32), {}
    for row, name in zip(vectors, names):
        words, hits = _first_complete(readings[name], found, kind)
        if lacking := [word for word, hit in zip(words, hits) if hit is None]:
            absent[name] = lacking
            if missing == "error":
                continue
            hits = [_stand_in(word, known, missing) if hit is None else hit for word, hit in zip(words, hits)]
        row[:] = np.mean(hits, axis=0)
    return vectors, absent


def _stand_in(word, known, missing):
    """A vector (D,) for a missing word: the mean of the `known` (K, D), or a random one of their mean length."""
    if missing == "mean":
        return known.mean(axis=0)
    return _random(word, known.shape[1]) * np.linalg.norm(known, axis=1).mean() / known.shape[1]**0.5


def _readings(name, kind):
    """The lists of words that may stand for a name, best first (see the head of this file)."""
    phrase = (EXCEPTIONS | EXCEPTIONS_OF.get(kind, {})).get(name.lower())
    if phrase and kind == "fasttext":
        return [phrase.split("_")]
    phrase = re.sub(r"\s+", "_", (phrase or name).strip())
    parts, words = ([w for w in re.split(at, phrase) if w] or [name] for at in (r"[_.]+", r"[\W_]+"))
    if kind == "fasttext":
        return [[phrase], parts]
    bare = [w for w in words if w.lower() not in ("a", "and", "of", "to")] or words
    return [[name]] * (kind == "npz") + [[phrase], parts, words, bare]


def _spellings(word, kind):
    """How a word may be written in a file of this kind, best first; no capitalised phrases: published work has none."""
    if kind == "fasttext":
        return [word.lower()]
    written = [word, word.lower()] if kind in ("word2vec", "npz") else [word.lower(), word]
    return written if "_" in word else [*written, word.title()]


def _first_complete(readings, found, kind):
    """The first reading with a vector for every word, else the last: its words and their vectors (None: missing)."""
    for words in readings:
        hits = [next((found[s] for s in _spellings(word, kind) if s in found), None) for word in words]
        if all(hit is not None for hit in hits):
            break
    return words, hits


@contextmanager
def _opened(path):
    """A file, unpacked on the way if it is gzip, and a function that shows on stderr how far it has been read."""
    with open(path, "rb") as raw, Progress(f"reading {path.name}", os.path.getsize(path) >> 20, "MB") as progress:
        file = gzip.open(raw) if raw.read(2) == b"\x1f\x8b" else raw
        raw.seek(0)
        yield file, lambda: progress.update((raw.tell() >> 20) - progress.done)


def _recognise(head):
    """A file's format from its first bytes; for text and word2vec also: words (None: unsaid), D, where rows begin."""
    if head.startswith(FASTTEXT):
        return ("fasttext",)
    if head.startswith(b"PK"):
        return ("npz",)
    first, _, rest = head.partition(b"\n")
    if header := re.fullmatch(rb"(\d+) (\d+)\s*", first):
        count, dim = map(int, header.groups())
        # D numbers as text take at least 2 D - 1 bytes, all of these; D binary numbers almost never look so
        text = not rest.partition(b" ")[2][:2 * dim - 1].translate(None, b"0123456789+-.eE ")
        return "text" if text else "word2vec", count, dim, len(first) + 1
    if re.fullmatch(rb"\S+( [-+.\deE]+)+\s*", first):
        return "glove", None, len(first.split()) - 1, 0
    raise ValueError(f"it begins with {head[:20]!r}, which is neither GloVe, word2vec, fastText nor .npz")


def _read_text(file, wanted, tick, count, dim, start):
    """`word number number ...` a line."""
    found, keys = {}, {word.encode(): word for word in wanted}
    file.seek(start)
    while lines := file.readlines(CHUNK):
        for line in lines:
            word = line[:line.find(b" ")]
            if word in keys and keys[word] not in found:
                entry, *numbers = line.rstrip().rsplit(b" ", dim)
                if len(numbers) != dim:
                    raise ValueError(f"{word.decode()!r} has {len(numbers)} numbers, the first word {dim}")
                if entry == word:  # and not a longer entry with spaces in it, as some GloVe files have
                    found[keys[word]] = np.array([float(number) for number in numbers], np.float32)
        tick()
    return found, dim


def _read_word2vec(file, wanted, tick, count, dim, start):
    """`word `, then D float32, with or without a newline."""
    file.seek(start)
    found, _ = _scan(file, wanted, tick, count, b" ", 4 * dim)
    return {word: np.frombuffer(record, "<f4") for word, (_, record) in found.items()}, dim


def _scan(file, wanted, tick, count, end, size):
    """Of `count` entries of a word, `end`, `size` bytes: {word: (number, bytes)} of those wanted; bytes in all."""
    keys, found = {word.encode(): word for word in wanted}, {}
    buffer, at, gone = b"", 0, 0
    for number in range(count):
        stop = buffer.find(end, at)
        if stop < 0 or stop + 1 + size > len(buffer):
            gone += at
            buffer, at = buffer[at:] + file.read(CHUNK), 0
            stop = buffer.find(end)
            if stop < 0 or stop + 1 + size > len(buffer):
                raise EOFError(f"it ends after {number:,} of {count:,} words: fetch it again")
            tick()
        word = buffer[at:stop].lstrip(b"\n")
        at = stop + 1 + size
        if word in keys:
            found.setdefault(keys[word], (number, buffer[stop + 1:at]))
    return found, gone + at


def _read_fasttext(file, wanted, tick):
    """A fastText model, versions 11 and 12: arguments, dictionary, then the matrix, of which it reads the rows needed.

    A word's vector is the mean of its own row (if the dictionary has it) and those of its n-grams.
    """
    header = struct.Struct("<2i12id3i2q")
    fields = header.unpack(_take(file, header.size))
    version, dim, model, bucket, low, high, size, known, pruned = (fields[i] for i in (1, 2, 9, 10, 11, 12, 15, 16, 19))
    if version not in (11, 12):
        raise ValueError(f"fastText's format has version {version}, expected 11 or 12")
    found, length = _scan(file, wanted, tick, size, b"\0", 9)  # after each word: its count, its type
    file.seek(header.size + length)
    if pruned > 0 or _take(file, 1) != b"\0":
        raise ValueError("the fastText model is quantised (.ftz): take the full .bin")
    rows, width = struct.unpack("<2q", _take(file, 16))
    if width != dim or rows < known + bucket:
        raise ValueError(f"its matrix is {rows} x {width}, expected {known + bucket} x {dim}")
    start, parts = file.tell(), {}
    high = 0 if not bucket or (version == 11 and model == 3) else high  # old classifiers have no n-grams
    for word in wanted:
        own = [found[word][0]] if word in found and found[word][0] < known else []
        if own or not re.search(r"[_.]", word):  # phrases are not made up, their parts are
            parts[word] = own + [known + hashed % bucket for hashed in _ngram_hashes(f"<{word}>", low, high)]
    matrix = {}
    for row in sorted(set().union(*parts.values())):  # ascending, for gzip cannot go back
        file.seek(start + row * 4 * dim)
        matrix[row] = np.frombuffer(_take(file, 4 * dim), "<f4")
        tick()
    return {word: np.mean([matrix[row] for row in rows], axis=0) for word, rows in parts.items() if rows}, dim


def _take(file, size):
    """Exactly `size` bytes."""
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends early: fetch it again")
    return data


def _ngram_hashes(word, low, high):
    """fastText's hashes (FNV-1a of signed bytes) of all n-grams of `low` to `high` letters, but for bare < and >."""
    for i in range(len(word)):
        for n in range(max(low, 1), min(high, len(word) - i) + 1):
            if n == 1 and i in (0, len(word) - 1):
                continue
            value = 2166136261
            for byte in word[i:i + n].encode():
                value = (value ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619 & 0xFFFFFFFF
            yield value


def _read_npz(file, wanted, tick):
    """Arrays `names` or `words` and `vectors`, or `states`, `state_vectors`, `objects`, `object_vectors`."""
    found, dims = {}, set()
    with np.load(file) as arrays:
        for key, rows in {"names": "", "words": "", "states": "state_", "objects": "object_"}.items():
            rows += "vectors"
            if key in arrays and rows in arrays:
                words, vectors = arrays[key], arrays[rows].astype(np.float32)
                if vectors.ndim != 2 or words.shape != vectors.shape[:1]:
                    raise ValueError(f"{rows} has shape {vectors.shape}, expected ({len(words)}, D) for {key}")
                dims.add(vectors.shape[1])
                for word, vector in zip(words.tolist(), vectors):
                    found.setdefault(word, vector)  # a state and object of one name: the state's
        if len(dims) != 1:
            raise ValueError(f"expected arrays `names` and `vectors` of one D, found {', '.join(arrays.files)}")
    return {word: found[word] for word in wanted & found.keys()}, dims.pop()


READERS = {  # "glove" is text without, "text" with a first line of counts
    "glove": _read_text, "text": _read_text, "word2vec": _read_word2vec, "fasttext": _read_fasttext, "npz": _read_npz}
