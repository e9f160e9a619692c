"""Word vectors against what the fastText and gensim packages gave (tests/data/words_*), and files
written here."""

import gzip
import io
import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import words
from words import word_vectors

HERE = Path(__file__).parent
SHARED = HERE / "../../shared/data"
FASTTEXT = (
    HERE / "data/words_fasttext.bin"
)  # fasttext-wheel 0.9.2: skipgram, D 6, 50 buckets, n-grams of 2 to 4
WORD2VEC = HERE / "data/words_word2vec.bin"  # gensim 4.4: D 5
VOCABULARY = (
    "old new red fake fur leather shoe boots ankle t-shirt fire hydrant fire_hydrant and Paris"
).split()


def expected(path):
    """What the package that made a file says: {word: vector}."""
    with np.load(path.with_suffix(".npz")) as arrays:
        return dict(zip(arrays["names"].tolist(), arrays["vectors"]))


def rows(vocabulary=VOCABULARY, dim=3):
    """Made-up vectors that text of six decimals holds exactly enough."""
    drawn = np.random.default_rng(0).standard_normal((len(vocabulary), dim)).astype(np.float32)
    return dict(zip(vocabulary, drawn.round(4)))


def text(vectors, header=False, end="\n"):
    first = f"{len(vectors)} {len(next(iter(vectors.values())))}{end}" if header else ""
    return (
        first + "".join(f"{w} {' '.join(f'{x:.6f}' for x in v)}{end}" for w, v in vectors.items())
    ).encode()


def binary(vectors, newline=b""):
    body = b"".join(
        w.encode() + b" " + v.astype("<f4").tobytes() + newline for w, v in vectors.items()
    )
    return f"{len(vectors)} {len(next(iter(vectors.values())))}\n".encode() + body


@pytest.fixture
def write(tmp_path):
    def put(content, name="vectors"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return put


@pytest.mark.parametrize("packed", [False, True])
def test_fasttext_model_equals_package(packed, write):
    path = write(gzip.compress(FASTTEXT.read_bytes())) if packed else FASTTEXT
    truth = expected(FASTTEXT)
    names = [name for name in truth if " " not in name]
    np.testing.assert_allclose(
        word_vectors(names, path), [truth[name] for name in names], atol=1e-7, rtol=0
    )
    phrases = word_vectors(["Faux.Fur", "boots.ankle", "fake fur", "UNKNOWN"], path)
    mean = (truth["fake"] + truth["fur"]) / 2
    wanted = [truth["fake fur"], truth["ankle boots"], mean, truth["unknown"]]
    np.testing.assert_allclose(phrases, wanted, atol=1e-7, rtol=0)


def test_word2vec_equals_package(write):
    truth = expected(WORD2VEC)
    names = list(truth)
    assert np.array_equal(word_vectors(names, WORD2VEC), list(truth.values()))
    assert np.array_equal(word_vectors(names, write(binary(truth, b"\n"))), list(truth.values()))
    assert np.array_equal(
        word_vectors(names, write(gzip.compress(WORD2VEC.read_bytes()))), list(truth.values())
    )


@pytest.mark.parametrize(
    "content",
    [
        text(rows()),
        text(rows(), header=True),
        text(rows(), end=" \n"),
        text(rows(), header=True, end="\r\n"),
        binary(rows()),
        text({"the": rows()["old"], "old shoe": rows()["new"], ". .": rows()["new"], **rows()}),
        text(rows()) + text({"old": rows()["new"]}),
        gzip.compress(text(rows())),
        gzip.compress(binary(rows())),
    ],
    ids="glove header trailing crlf word2vec spaces twice glove.gz word2vec.gz".split(),
)
@pytest.mark.parametrize("chunk", [64, 1 << 20])  # a small one: entries across chunks
def test_formats_by_content(content, chunk, write, monkeypatch):
    monkeypatch.setattr(words, "CHUNK", chunk)
    vectors = word_vectors(VOCABULARY, write(content, "any.name"))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, list(rows().values()), atol=1e-6)


def test_short_numbers_are_text(write):
    path = write(b"2 2\nold 0 1\nnew 1 0\n")
    assert word_vectors(["new", "old"], path).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "name, kind, readings",
    [
        ("Faux.Leather", "word2vec", [["fake_leather"], ["fake", "leather"]]),
        ("faux.leather", "fasttext", [["fake leather"]]),
        ("Nubuck", "glove", [["grainy_leather"], ["grainy", "leather"]]),
        ("Nubuck", "text", [["Nubuck"]]),
        ("Nubuck", "npz", [["Nubuck"]]),
        ("Faux.Fur", "npz", [["Faux.Fur"], ["fake_fur"], ["fake", "fur"]]),
        ("dry-erase_board", "glove", [["dry_erase_board"], ["dry", "erase", "board"]]),
        ("traffic_light", "fasttext", [["traficlight"]]),
        ("traffic_light", "word2vec", [["traffic_light"], ["traffic", "light"]]),
        ("Off  White ", "glove", [["Off_White"], ["Off", "White"]]),
        ("Red.T-Shirt", "glove", [["Red.T-Shirt"], ["Red", "T-Shirt"], ["Red", "T", "Shirt"]]),
        ("Lip_and_Nail", "word2vec", [["Lip_and_Nail"], ["Lip", "and", "Nail"], ["Lip", "Nail"]]),
        ("and", "glove", [["and"]]),
        ("--", "glove", [["--"]]),
    ],
)
def test_readings(name, kind, readings):
    once = [list(words) for words in dict.fromkeys(map(tuple, words._readings(name, kind)))]
    assert once == readings


def test_spellings():
    truth = expected(WORD2VEC)
    names = (
        "New new CANVAS Canvas paris Fire\tHydrant Old-Leather Faux.Leather old_and_leather".split(
            " "
        )
    )
    mean = (truth["old"] + truth["leather"]) / 2
    wanted = [
        truth["New"],
        truth["New"],
        truth["canvas"],
        truth["Canvas"],
        truth["Paris"],
        truth["fire_hydrant"],
        mean,
        (truth["fake"] + truth["leather"]) / 2,
        mean,
    ]
    np.testing.assert_allclose(word_vectors(names, WORD2VEC), wanted, atol=1e-6)


def test_npz(write, tmp_path):
    vectors = np.arange(12, dtype=np.float64).reshape(4, 3)
    np.savez(tmp_path / "a.npz", names=["Faux.Fur", "old", "Old", "shoe"], vectors=vectors)
    found = word_vectors(["Old", "Faux.Fur", "old_shoe"], tmp_path / "a.npz")
    assert np.array_equal(found, [vectors[2], vectors[0], (vectors[1] + vectors[3]) / 2])
    np.savez(
        tmp_path / "b.npz",
        states=["old", "red"],
        state_vectors=vectors[:2],
        objects=["shoe", "fur"],
        object_vectors=vectors[2:],
    )
    assert np.array_equal(word_vectors(["old", "red", "shoe", "fur"], tmp_path / "b.npz"), vectors)
    np.savez(tmp_path / "c.npz", names=["old"], vectors=vectors)
    np.savez(tmp_path / "d.npz", features=vectors)
    for name, message in {
        "c": r"\(4, 3\), expected \(1, D\)",
        "d": "expected arrays.*features",
    }.items():
        with pytest.raises(ValueError, match=message):
            word_vectors(["old"], tmp_path / f"{name}.npz")


def test_sources_side_by_side(write):
    names, glove = ["old", "new"], write(text(rows()), "a+b.txt")
    apart = [word_vectors(names, source) for source in (WORD2VEC, "random", glove)]
    assert np.array_equal(word_vectors(names, f"{WORD2VEC}+random", str(glove)), np.hstack(apart))
    assert word_vectors([], glove, "random").shape == (0, 303)
    with pytest.raises(ValueError, match="no word vectors named"):
        word_vectors(names)


def test_random_depends_on_the_name_alone():
    both = word_vectors(["old", "new"], "random")
    assert both.dtype == np.float32 and both.shape == (2, 300)
    assert np.array_equal(
        both[::-1], word_vectors(["new", "old"], "random")
    ) and not np.array_equal(*both)
    many = word_vectors(map(str, range(500)), "random")
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02
    assert abs(np.corrcoef(many) - np.eye(500)).max() < 0.35  # 6 standard deviations


def test_files_under_the_root(write, tmp_path):
    for name, place in words.FILES.items():
        with pytest.raises(FileNotFoundError, match=f"{place}.*download.py --vectors {name}"):
            word_vectors(["old"], name, root=tmp_path)
        write(gzip.compress(text(rows())), f"{place}.gz")
        packed = word_vectors(["old"], name, root=tmp_path)
        write(text(rows()), place)
        assert np.array_equal(packed, word_vectors(["old"], name, root=tmp_path))
    with pytest.raises(
        FileNotFoundError, match="expected word2vec, fasttext, glove, random or a file"
    ):
        word_vectors(["old"], "gloove", root=tmp_path)


def test_all_misses_in_one_error(write):
    path = write(text(rows()))
    with pytest.raises(ValueError) as error:
        word_vectors(["old", "Boots.Mid-Calf", "wet dog", "wet dog", "new"], path, WORD2VEC)
    for part in (
        f"{path} has no vectors for 2 of 4 names: Boots.Mid-Calf (midcalf), wet dog (wet dog)",
        f"{WORD2VEC} has no vectors for 2 of 4 names: Boots.Mid-Calf (midcalf boots), wet dog",
        "--missing random",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match='expected "error"'):
        word_vectors(["old"], path, missing="skip")
    with pytest.raises(ValueError, match=r"expected a list of names, \['old'\]"):
        word_vectors("old", path)


def test_missing_words_stand_in(write):
    path, known = write(text(rows(dim=300))), rows(dim=300)
    names, found = (
        ["midcalf", "old", "Boots.Mid-Calf", "new"],
        np.array([known["old"], known["boots"], known["new"]]),
    )
    with pytest.warns(
        UserWarning, match=r"2 of 4 names: midcalf \(midcalf\), Boots.Mid-Calf \(midcalf\): mean"
    ):
        mean = word_vectors(names, path, missing="mean")
    np.testing.assert_allclose(mean[0], found.mean(0), atol=1e-6)
    np.testing.assert_allclose(mean[2], (found.mean(0) + known["boots"]) / 2, atol=1e-6)
    with pytest.warns(UserWarning, match="random vectors"):
        drawn = word_vectors(names, path, missing="random")
        again = word_vectors(names[::-1], path, missing="random")[::-1]
    assert np.array_equal(drawn, again) and np.array_equal(drawn[[1, 3]], mean[[1, 3]])
    assert np.isclose(np.linalg.norm(drawn[0]), np.linalg.norm(found, axis=1).mean(), rtol=0.15)
    np.testing.assert_allclose(drawn[2], (drawn[0] + known["boots"]) / 2, atol=1e-6)
    with pytest.raises(ValueError, match="nothing to take mean vectors from"):
        word_vectors(["midcalf"], path, missing="mean")


def zipped(*members):
    """A .zip of (name, content)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def archive(**arrays):
    """The bytes of an .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"<!DOCTYPE html>\n<html>", "<!DOCTYPE html>"),
        (b"", "b''"),
        ("old 0.1 0.2".encode("utf-16"), "in UTF-16: save it as UTF-8"),
        (archive(names=np.array(["old"], object), vectors=np.ones((1, 2))), "np.array.names, str."),
        (b"PK\x03\x04 no zip", "not a zip file"),
        (zipped(("names.npy", b"old"), ("vectors.npy", b"1 2")), "convert"),
        (b"old 0.1 0.2\nnew 0.1\n", "'new' has a vector of size 1, expected 2"),
        (b"old 0.1 0.2\nnew 0.1 x\n", "convert"),
        (b"old 0.1 0.2\nnew nan 1\n", "NaN"),
        (gzip.compress(text(rows()))[:-9], "ended before"),
        (b"\x1f\x8bno gzip at all", "compression method"),
        (words.FASTTEXT_BEGINS + bytes(100), "version 0"),
        (binary(rows())[:-3], "ends after 14 of 15"),
        (b"0 0\n", "vectors have 0 numbers"),
        (b"1 0\nnew\n", "vectors have 0 numbers"),
    ],
)
def test_bad_files(content, message, write):
    path = write(content)
    with pytest.raises((ValueError, OSError), match=f"{path}.*{message}"):
        word_vectors(["new"], path)


def test_fasttext_cut_short_or_quantised(write):
    model = FASTTEXT.read_bytes()
    matrix = model.index(struct.pack("<2q", 70, 6)) + 16  # 20 words and 50 buckets
    names = [name for name in expected(FASTTEXT) if name != "fake fur"] + [
        f"word{i}" for i in range(50)
    ]  # every row
    for size in [*range(4, matrix, 3), *range(matrix, matrix + 70 * 6 * 4, 97)]:
        with pytest.raises(ValueError, match="cannot read .*: it ends"):
            word_vectors(names, write(model[:size]))
    with pytest.raises(ValueError, match="quantised"):
        word_vectors(["old"], write(model[: matrix - 17] + b"\1" + model[matrix - 16 :]))


def test_exceptions_are_the_published():
    if not SHARED.exists():
        pytest.skip("no ../shared")
    published = json.loads((SHARED / "words/published_names.json").read_text())
    lower = {
        table: {name.lower(): words for name, words in names.items()}
        for table, names in published.items()
    }
    assert words.EXCEPTIONS == lower["all"]
    assert words.EXCEPTIONS_OF == {
        "glove": lower["glove only"],
        "fasttext": lower["fasttext instead"],
    }


def test_every_primitive_has_a_vector():
    if not SHARED.exists():
        pytest.skip("no ../shared")
    glove = SHARED / "words/glove.100d.subset.txt"
    for folder in ("fashion/compositional-split-natural", "splits/mit-states", "splits/cgqa"):
        names = sorted(
            {
                name
                for file in (SHARED / folder).glob("*_pairs.txt")
                for name in file.read_text().split()
            }
        )
        assert word_vectors(names, glove).shape == (len(names), 100)
    with np.load(SHARED / "splits/ut-zap50k/word_vectors_300d.npz") as arrays:
        names = [*arrays["states"], *arrays["objects"]]
        vectors = np.vstack([arrays["state_vectors"], arrays["object_vectors"]])
    lacking = (
        r"3 of 28 names: Nubuck \(grainy\), Boots.Mid-Calf \(midcalf\), Shoes.Oxfords \(oxford\)"
    )
    with pytest.raises(ValueError, match=lacking):
        word_vectors(names, glove)
    assert np.array_equal(
        word_vectors(names, SHARED / "splits/ut-zap50k/word_vectors_300d.npz"), vectors
    )


# ---- what people bring ----


BOM = b"\xef\xbb\xbf"
EXTRA = ("__MACOSX/._v.txt", b"\0\1"), ("folder/", b""), ("folder/.hidden", b"x")


@pytest.mark.parametrize(
    "content",
    [
        BOM + text(rows()),
        BOM + text(rows(), header=True),
        text(rows()).replace(b" ", b"\t"),
        text(rows(), header=True).replace(b" ", b"\t"),
        text(rows()).replace(b" ", b"\t", 1),
        text(rows()).replace(b" 0.", b"\t0."),
        text({"New York City": rows()["old"], "at name@x.org": rows()["old"], **rows()}),
        text({"New York": rows()["old"], **rows()}, header=True),
        zipped(("v.txt", text(rows()))),
        zipped(*EXTRA, ("folder/v.vec", text(rows(), header=True))),
        zipped(("v.bin", binary(rows()))),
        zipped(("v.txt.gz", gzip.compress(text(rows())))),
        gzip.compress(zipped(("v.txt", text(rows())))),
        zipped(("README.txt", b"hello"), ("notes.pdf", b"%PDF"), ("v.txt", text(rows()))),
    ],
    ids="bom bom+counts tabs tabs+counts one-tab some-tabs phrases phrases+counts zip vec.zip "
        "bin.zip "
    "gz.zip zip.gz readme.zip".split(),
)
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_vector_files_as_people_have_them(content, chunk, write, monkeypatch):
    monkeypatch.setattr(words, "CHUNK", chunk)
    found = word_vectors(VOCABULARY, write(content, "any.name"))
    np.testing.assert_allclose(found, list(rows().values()), atol=1e-6)


@pytest.mark.parametrize("newline", [b"", b"\n"])
@pytest.mark.parametrize(
    "first", [b"0.1 0.2 0.3 ", b"111122223333", b"1 2\n3 4\n5 6\n", b" 1 2 3 4 5 6"]
)
def test_a_binary_vector_that_looks_like_text(first, newline, write):
    vectors = {"old": np.frombuffer(first, "<f4"), "new": np.float32([1, -2, 3])}
    found = word_vectors(["new", "old"], write(binary(vectors, newline)))
    assert np.array_equal(found, [vectors["new"], vectors["old"]])


def test_zipped_fasttext_and_npz(write, tmp_path):
    truth = expected(FASTTEXT)
    names = [name for name in truth if " " not in name]
    path = write(zipped(("model.bin", FASTTEXT.read_bytes())), "model.zip")
    np.testing.assert_allclose(
        word_vectors(names, path), [truth[n] for n in names], atol=1e-7, rtol=0
    )
    np.savez(tmp_path / "a.npz", names=["old"], vectors=[[1.0, 2]])
    path = write(zipped(("a.npz", (tmp_path / "a.npz").read_bytes())), "a.zip")
    assert word_vectors(["old"], path).tolist() == [[1, 2]]


def test_zip_of_several_files(write, tmp_path):
    other = {word: -vector for word, vector in rows().items()}
    content = zipped(("glove.6B.50d.txt", text(other)), ("glove.6B.300d.txt", text(rows())))
    write(content, "glove/glove.6B.300d.txt.zip")
    found = word_vectors(["old"], "glove", root=tmp_path)  # the member that the source means
    np.testing.assert_allclose(found, [rows()["old"]], atol=1e-6)
    for packed, message in (
        (content, "it holds glove.6B.50d.txt, glove.6B.300d.txt: expected one"),
        (zipped(), "it holds no file: expected one"),
        (zipped(("a.txt", b"hello\n")), "it begins with b'hello"),
    ):
        with pytest.raises(ValueError, match=f"vectors.zip: {message}"):
            word_vectors(["old"], write(packed, "vectors.zip"))
    locked = bytearray(zipped(("a.txt", text(rows()))))
    locked[6] |= 1  # says in both headers that it is encrypted
    locked[locked.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(ValueError, match="cannot read .*encrypted"):
        word_vectors(["old"], write(bytes(locked), "vectors.zip"))


def test_the_file_says_what_it_is():
    command = [sys.executable, words.__file__]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.count("\n") == 1 and "python compcos.py --vectors" in out


def test_all_sources_that_are_lacking_are_said_at_once(tmp_path):
    (tmp_path / "there.txt").write_text("a 1 2\n")
    assert words.lacking("random", str(tmp_path / "there.txt")) == []
    said = words.lacking("fasttext+word2vec", "random", "none.txt", root=tmp_path)
    assert len(said) == 4 and "--vectors random" in said[3]
    for name, text in zip(("cc.en.300.bin", "GoogleNews", "none.txt"), said):
        assert name in text
