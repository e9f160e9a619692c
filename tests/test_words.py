"""Tests of lab/words.py: vectors equal those of the fastText and gensim packages
(tests/data/words_*), and those of files written here."""

import gzip
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from lab import words
from lab.words import word_vectors

HERE = Path(__file__).parent
SHARED = HERE / "../../shared/data"
# fasttext-wheel 0.9.2: skipgram, D 6, 50 buckets, n-grams of 2 to 4
FASTTEXT = HERE / "data/words_fasttext.bin"
WORD2VEC = HERE / "data/words_word2vec.bin"  # gensim 4.4: D 5
VOCABULARY = (
    "old new red fake fur leather shoe boots ankle t-shirt fire été fire_hydrant and Paris"
).split()


def expected(path):
    """Return the vectors that the package which made a file gave: {word: vector}."""
    with np.load(path.with_suffix(".npz")) as arrays:
        return dict(zip(arrays["names"].tolist(), arrays["vectors"]))


def rows(dim=3):
    """Return random vectors of four decimals: {word: vector}."""
    drawn = np.random.default_rng(0).standard_normal((len(VOCABULARY), dim)).astype(np.float32)
    return dict(zip(VOCABULARY, drawn.round(4)))


def text(vectors):
    lines = []
    for word, vector in vectors.items():
        lines.append(" ".join([word, *(f"{x:.4f}" for x in vector)]) + "\n")
    return "".join(lines).encode()


def binary(vectors, newline=b""):
    body = b"".join(word.encode() + b" " + vector.astype("<f4").tobytes() + newline
                    for word, vector in vectors.items())
    return f"{len(vectors)} {len(vectors['old'])}\n".encode() + body


def archive(**arrays):
    """Return the bytes of an .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.fixture
def write(tmp_path):
    def put(content, name="vectors"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return put


# ---- formats ----


@pytest.mark.parametrize("packed", [False, True])
def test_fasttext_model_equals_package(packed, write):
    path = write(gzip.compress(FASTTEXT.read_bytes())) if packed else FASTTEXT
    truth = expected(FASTTEXT)
    names = [name for name in truth if " " not in name]
    wanted = [truth[name] for name in names]
    np.testing.assert_allclose(word_vectors(names, path), wanted, atol=1e-7, rtol=0)
    phrases = word_vectors(["Faux.Fur", "fake fur", "UNKNOWN"], path)
    wanted = [truth["fake fur"], (truth["fake"] + truth["fur"]) / 2, truth["unknown"]]
    np.testing.assert_allclose(phrases, wanted, atol=1e-7, rtol=0)


def test_word2vec_equals_package():
    truth = expected(WORD2VEC)
    assert np.array_equal(word_vectors(list(truth), WORD2VEC), list(truth.values()))


@pytest.mark.parametrize("content", [
    b"15 3\n" + text(rows()).replace(b"\n", b" \r\n"),
    b"15 3\n" + text(rows()).replace(b" 0.", b"\t0."),
    text(rows()).replace(b"0.6404\n", b"6.404E-1\n"),
    text({"the": rows()["old"], "old shoe": rows()["new"], ". .": rows()["new"], **rows()}),
    text(rows()) + text({"old": rows()["new"]}),
    binary(rows()),
    gzip.compress(binary(rows(), newline=b"\n")),
    archive(names=list(rows()), vectors=list(rows().values())),
])
@pytest.mark.parametrize("chunk", [64, 1 << 20])  # a small one: entries across chunks
def test_formats_by_content(content, chunk, write, monkeypatch):
    monkeypatch.setattr(words, "CHUNK_SIZE", chunk)
    vectors = word_vectors(VOCABULARY, write(content))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, list(rows().values()), atol=1e-6)


# ---- names ----


@pytest.mark.parametrize("name, kind, splits", [
    ("Nubuck", "glove", ["grainy_leather", "grainy + leather"]),
    ("Faux.Fur", "npz", ["Faux.Fur", "fake_fur", "fake + fur"]),
    ("Off  White ", "fasttext", ["Off_White", "Off + White"]),
    ("Red.T-Shirt", "glove", ["Red.T-Shirt", "Red + T-Shirt", "Red + T + Shirt"]),
    ("Lip_and_Nail", "word2vec", ["Lip_and_Nail", "Lip + and + Nail", "Lip + Nail"]),
    ("--", "glove", ["--"]),
])
def test_splits(name, kind, splits):
    given = [" + ".join(split) for split in words._splits(name, kind)]
    assert list(dict.fromkeys(given)) == splits


def test_spellings():
    truth = expected(WORD2VEC)
    mean = (truth["old"] + truth["leather"]) / 2
    for name, wanted in {
            "new": truth["New"], "CANVAS": truth["canvas"], "Canvas": truth["Canvas"],
            "Fire\tHydrant": truth["fire_hydrant"], "old_and_leather": mean}.items():
        np.testing.assert_allclose(word_vectors([name], WORD2VEC), [wanted], atol=1e-6)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_exceptions_are_the_published():
    published = json.loads((SHARED / "words/published_names.json").read_text())
    tables = {"all": words.EXCEPTIONS, "glove only": words.FORMAT_EXCEPTIONS["glove"],
              "fasttext instead": words.FORMAT_EXCEPTIONS["fasttext"]}
    for title, table in tables.items():
        assert table == {name.lower(): words for name, words in published[title].items()}


# ---- sources, and what they lack ----


def test_sources_side_by_side(write):
    names = ["old", "new"]
    glove = write(text(rows()), "a+b.txt")
    apart = [word_vectors(names, source) for source in (WORD2VEC, "random", glove)]
    assert np.array_equal(word_vectors(names, WORD2VEC, "random", str(glove)), np.hstack(apart))


def test_random_depends_on_the_name_alone():
    both = word_vectors(["old", "new"], "random")
    assert np.array_equal(both[::-1], word_vectors(["new", "old"], "random"))


@pytest.mark.parametrize("name, place", words.FILES.items())
def test_files_under_the_root(name, place, write, tmp_path):
    write(gzip.compress(text(rows())), f"{place}.gz")
    np.testing.assert_allclose(word_vectors(["old"], name, root=tmp_path), [rows()["old"]])


def test_one_error_lists_all_absent_files(write, tmp_path):
    bad = write(b"")  # which is not read
    said = "fast/cc.en.*w2v/GoogleNews.* none.txt .* random, .*python -m lab.download --vec"
    with pytest.raises(FileNotFoundError, match=said):
        word_vectors(["old"], "fasttext", "word2vec", bad, "random", "none.txt", root=tmp_path)


def test_one_error_lists_all_missing_words(write):
    path = write(text(rows()))
    with pytest.raises(ValueError) as error:
        word_vectors(["old", "Boots.Mid-Calf", "wet dog", "wet dog", "new"], path, WORD2VEC)
    listed = "has no vectors for 2 of 4 names: Boots.Mid-Calf (midcalf"
    assert f"{path} {listed}), wet dog (wet dog); {WORD2VEC} {listed} boots)" in str(error.value)


def test_missing_words_are_replaced(write):
    known = rows(dim=300)
    path = write(text(known))
    with pytest.warns(UserWarning, match=r"midcalf \(midcalf\), .*\): mean vectors"):
        vectors = word_vectors(["midcalf", "Boots.Mid-Calf", "new"], path, missing="mean")
    mean = (known["boots"] + known["new"]) / 2
    wanted = [mean, (mean + known["boots"]) / 2, known["new"]]
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    with pytest.warns(UserWarning, match="random vectors"):
        drawn, *others = word_vectors(["midcalf", "boots", "new"], path, missing="random")
    assert np.array_equal(others, [known["boots"], known["new"]])
    length = np.linalg.norm(others, axis=1).mean()
    np.testing.assert_allclose(
        drawn, words._random_vector("midcalf", 300) * length / 300**0.5, 1e-5)


# ---- bad input ----


def test_bad_arguments_and_numbers(write):
    with pytest.raises(ValueError, match='must be "error", .* got \'skip\''):
        word_vectors(["old"], "random", missing="skip")
    with pytest.raises(ValueError, match="vectors contains no word of these names: use other"):
        word_vectors(["new"], write(b"old 1 2"), missing="mean")
    with pytest.raises(ValueError, match="vectors contains NaN"):
        word_vectors(["new"], write(b"old 1 2\nnew 1 nan"))


@pytest.mark.parametrize("content", [
    b"<!DOCTYPE html>\n<html>\n",
    "old 0.1 0.2".encode("utf-16"),
    archive(names=["new"], vectors=np.ones((2, 2))),
    b"old 0.1 0.2\nnew 0.1\n",
    gzip.compress(text(rows()))[:-9],
    binary(rows())[:-3],
    words.FASTTEXT_MAGIC + bytes(100),
])
def test_bad_files_are_one_line_that_names_the_formats(content, write):
    path = write(content)
    with pytest.raises(ValueError) as error:
        word_vectors(["new"], path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message and words.FORMATS in message


def test_vectors_still_in_a_zip_are_to_be_unpacked(write):
    path = write(archive(**{"glove.6B.50d.txt": 1}))
    with pytest.raises(ValueError, match=f"^{path} contains glove.6B.50d.txt .* unpack the"):
        word_vectors(["old"], path)


def test_names_of_an_archive_may_be_numbers(write):
    path = write(archive(names=[7, 10], vectors=np.eye(2)))
    assert word_vectors(["10", "7"], path).tolist() == [[0, 1], [1, 0]]


def test_fasttext_cut_short_or_quantised(write):
    model = FASTTEXT.read_bytes()
    matrix = model.index(struct.pack("<2q", 70, 6)) + 16  # 20 words and 50 buckets
    names = [f"word{i}" for i in range(50)]  # n-grams in every row
    for size in range(4, matrix + 70 * 6 * 4, 23):
        with pytest.raises(ValueError, match="it ends"):
            word_vectors([*names, *VOCABULARY], write(model[:size]))
    with pytest.raises(ValueError, match="quantised"):
        word_vectors(["old"], write(model[:matrix - 17] + b"\1" + model[matrix - 16:]))
