"""Word vectors for the names of states and objects, from the files that people have.

    from lab.words import word_vectors
    vectors = word_vectors(["old", "fire_hydrant"], "glove", root="data")  # (2, 300)

One pass over a file reads only the rows that the names need. Letters in comments and docstrings:
N names, D numbers in a vector.

A name becomes words in two steps. First, the tables below replace some names (in any case), as in
published work. Then the name is split in four ways: not at all ("fire_hydrant"); at `_`, `.` and
spaces; at everything but letters and digits; the same without *a, and, of, to*, which the published
word2vec lacks. The first split whose words all have vectors counts, and the mean of these vectors
is the vector of the name. A word is looked up as written, in lower case, then capitalised. Text
files are searched in lower case first, because the published ones contain nothing else. A `.bin` of
fastText builds vectors for unknown words from their n-grams, so that only lower case and the first
two splits are used with it.
"""

import gzip
import re
import struct
import warnings
from pathlib import Path

import numpy as np

from lab import shell
from lab.files import describe_file, reading


FILES = {  # below the data root
    "word2vec": "w2v/GoogleNews-vectors-negative300.bin",
    "fasttext": "fast/cc.en.300.bin",
    "glove": "glove/glove.6B.300d.txt",
}

# The published tables, in lower case: names of UT-Zappos and C-GQA that are not words.
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
FORMAT_EXCEPTIONS = {  # these come before EXCEPTIONS in files of one format
    "glove": {"nubuck": "grainy_leather"},
    "fasttext": {  # with a space: n-grams of the whole phrase instead of a mean over words
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
STOP_WORDS = ("a", "and", "of", "to")  # the published word2vec has no vectors for these
FORMATS = ("expected word vectors as text of GloVe or fastText in UTF-8, .bin of word2vec, .bin of "
           "fastText, or .npz of `names` (N,) and `vectors` (N, D), complete; each may be .gz")
CHUNK_SIZE = 1 << 20  # bytes in a read; larger chunks leave the processor's cache and take twice
                      # as long


def word_vectors(names, *sources, missing="error", root="data"):
    """Return one vector for each name, with the vectors of several sources side by side.

    The content of a file decides on its format: text of GloVe or fastText (blanks or tabs between
    the numbers, with or without a first line of counts), .bin of word2vec or fastText, or .npz of
    `names` (N,) and `vectors` (N, D), each also as .gz. If a file repeats a word, the first entry
    counts.

    Args:
        names (sequence of str): N names of states or objects, such as "old" or "Faux.Fur".
        *sources (str or Path): Each is "word2vec", "fasttext" or "glove" (the files FILES below
            `root`, which may be .gz), "random" (300 numbers from a standard normal distribution,
            seeded by the name), or the path of a file.
        missing (str): What happens with words that a file lacks. "error" raises a ValueError;
            "random" replaces each by a random vector, seeded by the word, of the average length;
            "mean" replaces each by the mean of the vectors found. A warning lists the replaced
            words.
        root (str or Path): The folder of the published files.

    Returns:
        np.ndarray: (N, D), float32. With several sources, D is the sum of theirs.

    Raises:
        FileNotFoundError: Files do not exist. All of them are listed, before any file is read.
        ValueError: A file cannot be read, or words are missing (all names are listed).

    >>> word_vectors(["old", "new"], "random").shape
    (2, 300)
    """
    if missing not in ("error", "random", "mean"):
        raise ValueError(f'missing must be "error", "random" or "mean", got {missing!r}')
    blocks = []
    problems = []
    for source, path in zip(sources, _locate(sources, root)):
        if path is None:
            blocks.append(np.stack([_random_vector(name, 300) for name in names]))
            continue
        vectors, incomplete = _look_up(names, path, missing)
        blocks.append(vectors)
        if incomplete:
            problems.append(f"{source} has no vectors for {len(incomplete)} of {len(set(names))} "
                            f"names: {', '.join(incomplete.values())}")
    if problems:
        problem = "; ".join(problems)
        if missing == "error":
            raise ValueError(f"{problem}: use other vectors, or pass --missing random or --missing "
                             "mean")
        warnings.warn(f"{problem}: {missing} vectors replace the words in brackets", stacklevel=2)
    return np.concatenate(blocks, axis=1)


def _locate(sources, root):
    """Return the path of each source's file, None for "random"; raise an error if any is absent."""
    paths = []
    absent = []
    for source in sources:
        path = Path(source)
        if source in FILES:
            path = Path(root, FILES[source])
        existing = [file for file in (path, Path(f"{path}.gz")) if file.is_file()]
        if source == "random":
            paths.append(None)
        elif existing:
            paths.append(existing[0])
        else:
            absent.append(f"{path} (or {path.name}.gz)")
    if absent:
        raise FileNotFoundError(f"no word vectors at {', '.join(absent)}: give a file of vectors, "
                                f"random, or one of {', '.join(FILES)} after `python -m "
                                f"lab.download --vectors NAME --data-root {root}`")
    return paths


def _random_vector(name, dim):
    """Draw a standard normal vector (dim,), the same for the same name on every machine."""
    return np.random.default_rng(list(name.encode())).standard_normal(dim, dtype=np.float32)


# ---- from names to words to vectors ----


def _look_up(names, path, missing):
    """Return vectors (N, D) from one file, and {name: "name (missing words)"} where any lack."""
    kind, vector_of, dim = _read(names, path)
    if not vector_of:
        raise ValueError(f"{path} contains no word of these names: use other vectors")
    known = np.array(list(vector_of.values()), np.float32)
    vector_of = dict(zip(vector_of, known))
    if not np.isfinite(known).all():
        raise ValueError(f"{path} contains NaN or numbers beyond float32 (3.4e38): use other "
                         "vectors")

    vectors = np.zeros((len(names), dim), np.float32)
    incomplete = {}
    for row, name in zip(vectors, names):
        words, word_rows = _first_complete(_splits(name, kind), vector_of, kind)
        lacking = [word for word, vector in zip(words, word_rows) if vector is None]
        if lacking:
            incomplete[name] = f"{name} ({' '.join(lacking)})"
        for place, word in enumerate(words):
            if word_rows[place] is None:
                word_rows[place] = _substitute(word, known, missing)  # unused with "error"
        row[:] = np.mean(word_rows, axis=0)
    return vectors, incomplete


def _substitute(word, known, missing):
    """Return the mean (D,) of the known vectors (K, D), or a random one of their average length."""
    if missing == "mean":
        return known.mean(axis=0)
    dim = known.shape[1]
    return _random_vector(word, dim) * np.linalg.norm(known, axis=1).mean() / dim**0.5


def _splits(name, kind):
    """Return the lists of words that a name may be split into, best first (see the module)."""
    exceptions = EXCEPTIONS | FORMAT_EXCEPTIONS.get(kind, {})
    phrase = exceptions.get(name.lower(), name)
    if kind == "fasttext" and phrase != name:
        return [phrase.split("_")]

    phrase = re.sub(r"\s+", "_", phrase.strip())
    parts = [part for part in re.split(r"[_.]+", phrase) if part] or [name]
    if kind == "fasttext":
        return [[phrase], parts]

    words = [word for word in re.split(r"[\W_]+", phrase) if word] or [name]
    content_words = [word for word in words if word.lower() not in STOP_WORDS] or words
    splits = [[phrase], parts, words, content_words]
    if kind == "npz":
        return [[name], *splits]
    return splits


def _spellings(word, kind):
    """Return the spellings that a word may have in a file of this kind, best first."""
    if kind == "fasttext":
        return [word.lower()]
    if kind in ("word2vec", "npz"):
        spellings = [word, word.lower()]
    else:
        spellings = [word.lower(), word]
    if "_" not in word:  # published work does not capitalise phrases
        spellings.append(word.title())
    return spellings


def _first_complete(splits, vector_of, kind):
    """Return the first split whose words all have vectors, else the last; and their vectors.

    The vector of a missing word is None.
    """
    for words in splits:
        vectors = []
        for word in words:
            spelling = next((way for way in _spellings(word, kind) if way in vector_of), None)
            vectors.append(vector_of.get(spelling))
        if all(vector is not None for vector in vectors):
            break
    return words, vectors


# ---- files and their formats ----


def _read(names, path):
    """Return the kind of a file, {word: vector (D,)} for all words that the names may need, and D.

    The kind is "glove" (text without a line of counts), "text", "word2vec", "fasttext" or "npz".
    """
    with reading(path, FORMATS), _open(path) as file:
        kind, count, dim = _recognise(file, path)
        needed = set()
        for name in names:
            for words in _splits(name, kind):
                for word in words:
                    needed.update(_spellings(word, kind))
        if kind == "npz":
            vector_of, dim = _read_npz(file, needed)
        elif kind == "fasttext":
            vector_of, dim = _read_fasttext(file, needed)
        elif kind == "word2vec":
            vector_of = _read_word2vec(file, needed, count, dim)
        else:
            vector_of = _read_text(file, needed, dim)
    return kind, vector_of, dim


def _open(path):
    """Open a file, and decompress it while it is read if it is gzip."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else open(path, "rb")


def _recognise(file, path):
    """Return the kind of an open file, its number of words and D; set it to where the words begin.

    The number of words is None where the first line does not contain it.
    """
    line = file.readline(CHUNK_SIZE)
    counts = re.fullmatch(rb"(\d+)\s+([1-9]\d*)\s*", line)
    if counts:  # text and the binary vectors of word2vec begin alike
        count, dim = int(counts[1]), int(counts[2])
        start = len(line)
        kind = "text" if _is_text(file.readline(CHUNK_SIZE), dim) else "word2vec"
    else:
        count, dim = None, len(line.split()) - 1
        start = 0
        if line.startswith(FASTTEXT_MAGIC):
            kind = "fasttext"
        elif line.startswith(b"PK"):
            kind = "npz"
        elif dim > 0 and _is_text(line, dim):
            kind = "glove"
        else:
            raise ValueError(f"{path} is {describe_file(path)}, and begins with {line[:20]!r}")
    file.seek(start)
    return kind, count, dim


def _is_text(line, dim):
    """Tell whether the last D entries of a line are numbers."""
    return all(re.fullmatch(rb"[-+.\deE]+", number) for number in line.split()[-dim:])


def _read_text(file, needed, dim):
    """Read lines of `word number number ...` and return {word: vector (D,)}."""
    words = {word.encode(): word for word in needed}
    vector_of = {}
    for line in file:
        line = line.replace(b"\t", b" ")
        word = line[:line.find(b" ")]
        if word not in words or words[word] in vector_of:
            continue
        entry, *numbers = line.rsplit(None, dim)
        if len(numbers) != dim:
            raise ValueError(f"{word.decode()!r} has {len(numbers)} numbers, the first word {dim}")
        if entry == word:  # some GloVe files also have longer entries, with spaces in them
            vector_of[words[word]] = np.array(numbers, float)
    return vector_of


def _read_word2vec(file, needed, count, dim):
    """Read entries of a word, a blank and D float32, and return {word: vector (D,)}."""
    entries, _ = _scan(file, needed, count, end=b" ", size=4 * dim)
    return {word: np.frombuffer(data, "<f4") for word, (_, data) in entries.items()}


def _scan(file, needed, count, end, size):
    """Read `count` entries, each a word, the byte `end` and `size` bytes of data.

    Return {word: (number of the entry, data)} with the first entry of each needed word, and how
    many bytes all entries take. A newline before a word is skipped.
    """
    words = {word.encode(): word for word in needed}
    entries = {}
    buffer = b""
    at = 0  # where the next entry begins in the buffer
    passed = 0  # bytes of the file before the buffer
    for number in range(count):
        stop = buffer.find(end, at)
        while stop < 0 or stop + size >= len(buffer):  # the entry is incomplete: read on
            chunk = file.read(CHUNK_SIZE)
            if not chunk:
                raise EOFError(f"it ends after {number:,} of {count:,} words")
            passed += at
            buffer = buffer[at:] + chunk
            at = 0
            stop = buffer.find(end)
        word = buffer[at:stop].lstrip(b"\n")
        at = stop + 1 + size
        if word in words:
            entries.setdefault(words[word], (number, buffer[stop + 1:at]))
    return entries, passed + at


# ---- fastText's own format ----

FASTTEXT_MAGIC = b"\xba\x16\x4f\x2f"
FASTTEXT_HEADER = struct.Struct("<4x2i24x4i12x2i12xq")  # without the fields that are not used here


def _read_fasttext(file, needed):
    """Read a fastText model (versions 11 and 12) and return {word: vector (D,)} and D.

    The file consists of a header, a dictionary and a matrix. The vector of a word is the mean of
    the matrix's rows for its n-grams and, if the dictionary contains the word, its own row.
    """
    # The n-grams of `shortest` to `longest` letters share `buckets` rows, by their hashes. The
    # dictionary lists words first, then labels. `pruned` is the number of n-grams that were kept
    # when a model was reduced, and -1 for a full model.
    (version, dim, model, buckets, shortest, longest,
     entry_count, word_count, pruned) = FASTTEXT_HEADER.unpack(_take(file, FASTTEXT_HEADER.size))
    if version not in (11, 12) or model == 3:
        raise ValueError(f"version {version} of fastText's format, model {model}: expected version "
                         "11 or 12, and no classifier (3)")

    # The dictionary: each word, a zero byte, its count (int64) and its type (int8).
    entries, length = _scan(file, needed, entry_count, end=b"\0", size=9)
    file.seek(FASTTEXT_HEADER.size + length)
    if pruned > 0 or _take(file, 1) != b"\0":
        raise ValueError("the fastText model is quantised (.ftz): use the full .bin")

    # The matrix: its shape (2 int64), a row for each word, and one for each bucket of n-grams.
    start = file.tell() + 16
    rows_of = {}
    for word in needed:
        rows = []
        number, _ = entries.get(word, (word_count, None))
        if number < word_count:  # the dictionary contains it, as a word and not as a label
            rows.append(number)
        # A phrase gets no vector from n-grams: its parts do.
        if rows or not re.search(r"[_.]", word):
            for hashed in _ngram_hashes(f"<{word}>", shortest, longest):
                rows.append(word_count + hashed % buckets)
        rows_of[word] = rows
    matrix = {}
    for row in sorted(set().union(*rows_of.values())):  # ascending, since gzip cannot go back
        file.seek(start + row * 4 * dim)
        matrix[row] = np.frombuffer(_take(file, 4 * dim), "<f4")

    vector_of = {}
    for word, rows in rows_of.items():
        if rows:
            vector_of[word] = np.mean([matrix[row] for row in rows], axis=0)
    return vector_of, dim


def _take(file, size):
    """Read exactly `size` bytes."""
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends early")
    return data


def _ngram_hashes(word, shortest, longest):
    """Yield fastText's hashes of all n-grams of `shortest` to `longest` letters.

    The word stands between `<` and `>`; these two alone are no n-grams.
    """
    last = len(word) - 1
    for begin in range(len(word)):
        for length in range(max(shortest, 1), min(longest, len(word) - begin) + 1):
            if length > 1 or 0 < begin < last:
                yield _fnv1a(word[begin:begin + length].encode())


def _fnv1a(data):
    """Return the FNV-1a hash as fastText computes it: bytes from 128 on are negative int32."""
    value = 2166136261
    for byte in data:
        if byte >= 128:
            byte |= 0xFFFFFF00
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


# ---- NumPy's format ----


def _read_npz(file, needed):
    """Read the arrays `names` (N,) and `vectors` (N, D) and return {word: vector (D,)} and D."""
    with np.load(file) as arrays:
        if not {"names", "vectors"} <= set(arrays):
            raise ValueError(f"{file.name} contains {shell.shorten(arrays)} instead of `names` and "
                             "`vectors`: if these are files of vectors, unpack the archive and "
                             "give one of them")
        words = arrays["names"].astype(str)  # numbers, too, can be names
        vectors = arrays["vectors"]
    if vectors.shape[:-1] != words.shape:
        raise ValueError(f"`names` has the shape {words.shape}, `vectors` {vectors.shape}")
    vector_of = {}
    for word, vector in zip(words, vectors):
        if word in needed:
            vector_of.setdefault(word, vector)
    return vector_of, vectors.shape[1]
