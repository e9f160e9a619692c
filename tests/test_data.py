"""Tests of data.py and drawings.py: layouts, bad input, the check, features, splits."""

import hashlib
import os
import random
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
from lab import drawings
from lab.photos import missing_photos

LISTS = {
    "train": ["wet cat", "wet dog", "dry cat", "old Shoes.Flats"],
    "val": ["wet cat", "dry dog"],
    "test": ["wet dog", "old dog", "dry Shoes.Flats"],
}
ROWS = [
    ("a/1.jpg", "wet", "cat", "train"),
    ("a/2.jpg", "wet", "dog", "train"),
    ("b c/3.x.jpg", "dry", "cat", "train"),
    ("4.jpg", "old", "Shoes.Flats", "train"),
    ("5.jpg", "wet", "cat", "val"),
    ("6.jpg", "dry", "dog", "val"),
    ("7.jpg", "wet", "dog", "test"),
    ("8.jpg", "old", "dog", "test"),
    ("9.jpg", "dry", "Shoes.Flats", "test"),
]
NAMES = [row[0] for row in ROWS]
TABLE = "image,state,object,split\n"
# What commit 5c105a3 made, before data.py and drawings.py were rewritten.
DRAWN_SPLITS = "2cd2a71897708c435d521488ddf2159a"
DRAWN_DATA = "b41989a7abda38fa58a79d7aaa95d2f4"
DRAWN_LINE_END = {".csv": b"\r\n", ".txt": b"\n"}


def publish(folder, lists=LISTS, rows=ROWS, photos=True):
    """A folder in the shared layout."""
    (folder / data.SPLIT).mkdir(parents=True)
    for phase, pairs in lists.items():
        (folder / data.SPLIT / f"{phase}_pairs.txt").write_text("\n".join(pairs))
    torch.save([dict(zip(data.METADATA_KEYS, row)) for row in rows], folder / data.METADATA)
    for image, *_ in rows if photos else []:
        touch(folder / "images" / image)
    return folder


def touch(file):
    """A photo of one pixel in a colour of its own, whatever its suffix says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (1, 1), zlib.crc32(os.fsencode(file)) >> 8).save(file, "PNG")


def photos(folder, states=("wet", "dry"), objects=("cat", "dog"), number=8, style="{}/{}"):
    """A folder of photos, of one pixel each."""
    for state in states:
        for object_ in objects:
            for i in range(number):
                touch(folder / style.format(state, object_) / f"{i}.jpg")
    return folder


def table(folder, text):
    """A folder of own data."""
    folder.mkdir(exist_ok=True)
    (folder / "images.csv").write_text(text)
    return folder


def names(dataset, phase):
    """(image, "state object") of a phase."""
    pairs = [dataset.compositions[target] for target in dataset.targets[phase]]
    return list(zip(dataset.images[phase], pairs))


def shown(pairs, split, phase):
    """The set of compositions that a phase's images show."""
    return {pair for pair, its_phase in zip(pairs, split) if its_phase == phase}


def primitives(pairs):
    """(states, objects) of some compositions, as sets."""
    return {state for state, _ in pairs}, {object_ for _, object_ in pairs}


def check(capsys, *arguments):
    """Exit status and output of `python data.py`."""
    status = 0
    try:
        data.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out + captured.err


# ---- reading -------------------------------------------------------------------------------------


def test_shared_layout_by_name_and_by_path(tmp_path):
    odd = (".\\a\\1.jpg", " wet", *ROWS[0][2:])  # as Windows writes it
    folder = publish(tmp_path / "mit-states", rows=[odd, *ROWS[1:]], photos=False)
    (folder / "feasible_pairs.txt").write_text("wet cat\nwet dog\nold dog\n")
    for given in ("mitstates", folder, "mit-states"):
        dataset = data.load(given, tmp_path)
        assert dataset.name == Path(given).name and dataset.folder == folder and not dataset.notes
        assert dataset.upright == (given != "mitstates")  # the field's are read as published
        assert np.argwhere(dataset.feasible).tolist() == [[1, 2], [2, 1], [2, 2]]
        assert names(dataset, "train")[0] == ("a/1.jpg", "wet cat")


def test_random_folders_equal_the_definition(tmp_path):
    for seed in range(10):
        rng = random.Random(seed)
        every = [f"s{s} o{o}" for s in range(12) for o in range(4)]
        lists = {phase: rng.sample(every, 20) for phase in data.PHASES}
        drawn = []
        for i in range(400):
            pair = rng.choice([*every, "NA NA", "s3 NA"])
            drawn.append((f"{i}.jpg", pair, rng.choice([*data.PHASES, "NA"])))
        rows = [(image, *pair.split(), phase) for image, pair, phase in drawn]
        dataset = data.load(publish(tmp_path / str(seed), lists, rows, photos=False))
        listed = set().union(*lists.values())
        assert dataset.states == sorted({pair.split()[0] for pair in listed})  # s10 before s2
        assert dataset.targets["val"].dtype == dataset.pairs["val"].dtype == np.int64
        spelt = np.array(dataset.compositions).reshape(len(dataset.states), -1)
        trained = {pair for _, pair, phase in drawn if phase == "train"} & listed
        seen = trained | set(lists["train"])
        assert set(spelt[dataset.seen]) == seen
        for phase in data.PHASES:
            kept = [row[:2] for row in drawn if row[1] in listed and row[2] == phase]
            assert names(dataset, phase) == kept
            pairs = spelt[tuple(dataset.pairs[phase].T)]
            assert pairs.tolist() == sorted(lists[phase], key=dataset.compositions.index)
            assert set(spelt.ravel()[dataset.candidates(phase)]) == seen | set(lists[phase])


def test_what_is_odd_is_noted(tmp_path):
    lists = {**LISTS, "train": [*LISTS["train"], "new car"]}
    rows = [
        *ROWS,
        ("10.jpg", "dry", "dog", "test"),  # the set and not the pair says where an image belongs
        ("9.jpg", "dry", "Shoes.Flats", "test"),
        ("5.jpg", "wet", "cat", "test"),
    ]
    dataset = data.load(publish(tmp_path / "x", lists, rows, photos=False))
    assert dataset.images["test"][-3:] == ["10.jpg", "9.jpg", "5.jpg"]
    assert dataset.notes == [
        "no training image shows new, car",
        "test images of pairs in neither the test nor the training list: a ceiling of 83.3% in "
        "the closed world",
        "rows that repeat an image of their own or of another set, each of which counts: 2",
    ]
    rows = [row for row in ROWS if row[:2] not in (("6.jpg", "dry"), ("7.jpg", "wet"))]
    assert data.load(publish(tmp_path / "y", rows=rows, photos=False)).notes == [
        "val images show seen compositions alone: only that half can be evaluated",
        "test images show unseen compositions alone: only that half can be evaluated",
    ]


def test_names_that_differ_in_case_or_unicode_form_alone(tmp_path):
    """States get a note; files are found in any form."""
    typed, on_a_mac = "caf\u00e9.jpg", "cafe\u0301.jpg"
    folder = publish(tmp_path, rows=[(typed, "WET", "dog", "train"), *ROWS],
                     lists={**LISTS, "train": ["WET dog", *LISTS["train"]]})
    dataset = data.load(folder)
    dataset.path(typed).rename(folder / "images" / on_a_mac)
    assert not missing_photos(dataset)
    assert dataset.notes[0] == ("names that differ in case alone count as different, so spell "
                                "alike what is the same: WET, wet")


def test_tables_of_images(tmp_path):
    """Separators, quotes, and empty rows as spreadsheets write them."""
    rows = [
        ("./a/1.jpg", "dark  red", "car", "train"),
        (" a\\2.jpg ", "blue", '"bus, two\nlines"', "Train"),
        ("3.jpg", "blue", "car", "VAL"),
        ("4.jpg", "dark red", "car", "test"),
        ("5.jpg", "NA", "car", "test"),
    ]
    comma = table(tmp_path / "comma", TABLE + "".join(",".join(row) + "\n" for row in rows))
    swapped = "".join(f"{split};x;{o};{s};{image}\r\n" for image, s, o, split in rows)
    semicolon = f"\ufeffSplit;Comment;Object;state;image\r\n{swapped};;;;\r\n\r\n"
    for folder in (comma, table(tmp_path / "semicolon", semicolon)):
        dataset = data.load(folder)
        assert names(dataset, "train") == [("a/1.jpg", "dark red car"),
                                           ("a/2.jpg", "blue bus, two lines")]
        assert names(dataset, "val") == [("3.jpg", "blue car")]
        assert names(dataset, "test") == [("4.jpg", "dark red car"), ("5.jpg", "NA car")]


@pytest.mark.parametrize("file, content, said", [
    (f"{data.SPLIT}/val_pairs.txt", "wet dog\nwet\n", "val_pairs.txt,? line 2: .*'wet'"),
    ("feasible_pairs.txt", "wet cat\nwet bird\n", "'bird'.*of the lists"),
    (data.METADATA, [dict(image="1", attr=None, obj="dog", set="val")], "NoneType.*of texts image"),
    ("images.csv", "sep=,\nimage,state,object\n", "columns 'sep=,': remove any line above"),
    ("images.csv", "image,state,object\n1.jpg,wet,dog\n", "val or test of 1.jpg, .*--make-split"),
    ("images.csv", f"{TABLE}1.jpg,wet,dog,train\n2.jpg,,dog,val\n", "images.csv line 3: found"),
    ("images.csv", f"{TABLE}1.jpg,wet,dog,\xe4".encode("cp1252"), "images.csv .*as `CSV UTF-8`"),
    ("images.csv", TABLE.encode("utf-16"), "images.csv .*as `CSV UTF-8`"),
])
def test_bad_input_is_one_line(tmp_path, capsys, file, content, said):
    folder = publish(tmp_path / "x")
    if isinstance(content, list):
        torch.save(content, folder / file)
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, output = check(capsys, folder)
    assert status == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert re.search(said, output)


def test_names_and_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given, folder in (("shapes", "root/shapes"), ("./shapes", "shapes")):
        os.makedirs(folder)
        assert data.locate(given, "root") == Path(folder)
    for name, said in (("zappo", "no folder zappo, root/zappo; expected"),
                       ("shapes", "found none; `python data.py FOLDER --make-split`")):
        status, output = check(capsys, name, "--data-root", "root")
        assert status == 2 and said in output and output.count("\n") == 1


# ---- photos --------------------------------------------------------------------------------------


def test_the_check_counts_and_names_every_photo_that_is_missing_or_broken(tmp_path, capsys):
    folder = publish(tmp_path / "cgqa", rows=[*ROWS, ("10.jpg", "NA", "dog", "val")])
    for name in ("a/2.jpg", "9.jpg"):
        (folder / "images" / name).write_bytes(b"")
    status, output = check(capsys, "cgqa", "--data-root", tmp_path)
    assert status == 0 and output.splitlines() == [
        "cgqa: 3 states, 3 objects, 9 possible compositions",
        "      seen  unseen  images of seen  of unseen",
        "train    4       0               4          0",
        "val      1       1               1          1",
        "test     1       2               1          2",
        "note: files with the same bytes in several sets: a/2.jpg = 9.jpg",
        "note: cannot be read, and --skip-broken leaves out: a/2.jpg (an empty file), 9.jpg (an "
        "empty file)",
    ]
    for name in ("a/1.jpg", "5.jpg"):
        (folder / "images" / name).unlink()
    status, output = check(capsys, folder)
    assert status == 2 and "error: found neither in" in output and "): a/1.jpg, 5.jpg" in output


# ---- feature files -------------------------------------------------------------------------------


def test_features_do_instead_of_photos_but_a_cache_only_without_them(tmp_path, capsys):
    dataset = data.load(publish(tmp_path / "x"))
    published, cache = (dataset.folder / name for name in reversed(data.FEATURES))
    torch.save({"files": NAMES, "features": torch.ones(9, 4)}, published)
    assert data.finished_features(dataset) == published
    assert data.finished_features(dataset, "pixels") is None
    np.savez(cache, files=NAMES, features=np.ones((9, 4)), stamps=np.zeros((9, 2)))
    assert data.finished_features(dataset) is None
    shutil.rmtree(dataset.folder / "images")
    assert data.finished_features(dataset) == cache
    assert check(capsys, dataset.folder)[0] == 0
    cache.write_bytes(b"damaged")
    assert "features.npz is text" in check(capsys, dataset.folder)[1]


def test_content_decides_how_a_file_is_read(tmp_path):
    """NumPy's arrays, and tensors of any kind."""
    expected = np.array([[0.0, 2.0], [3.0, 0.0], [3.0, 0.0]])
    files = np.array(["./a", "b\\c", "cafe\u0301"])
    np.savez(tmp_path / "0.npz", files=files, features=expected.astype("f2"))
    tensor = torch.tensor(expected, requires_grad=True).bfloat16()
    torch.save({"files": files, "features": tensor}, tmp_path / "1.npz")
    for file in tmp_path.iterdir():
        stored = data.read_features(file)
        assert stored["files"] == ["a", "b/c", "caf\u00e9"]
        assert stored["features"].dtype == np.float32
        assert (stored["features"] == expected).all()


@pytest.mark.parametrize("content, said", [
    (dict(files=NAMES, features=np.zeros((2, 4))), r"9 files, features \(2, 4\)"),
    (dict(files=np.array(["a"], object), features=[[1]]), r"Python objects.*`names.astype\(str\)`"),
    (dict(names=NAMES), "'files'.*expected `files`"),
])
def test_bad_feature_files_are_named(tmp_path, content, said):
    np.savez(tmp_path / "f.npz", **content)
    with pytest.raises(ValueError, match=f"f.npz .*{said}"):
        data.read_features(tmp_path / "f.npz")


# ---- splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("root, style", [(".", "{}_{}"), ("images", "{}/{}")])
def test_make_split_of_photos_in_folders(tmp_path, capsys, root, style):
    photos(tmp_path / root, ["wet", "dry", "old"], ["cat", "garden hose", "A.B", "big_dog"],
           style=style)
    assert check(capsys, tmp_path, "--make-split")[0] == 0
    dataset = data.load(tmp_path)
    assert len(dataset.every_image) == 96 and not missing_photos(dataset)
    for image, pair in names(dataset, "train"):
        assert image.startswith(style.format(*pair.split(" ", 1)))
    assert dataset.seen.sum() == 8
    assert "has a split: use it" in check(capsys, tmp_path, "--make-split")[1]  # never over that


def test_folders_that_are_the_split(tmp_path):
    for split, style in (("train", "{}/{}"), ("valid", "{}_{}"), ("test", "{}/{}")):
        photos(tmp_path / "x/images" / split, ["wet"], ["NA", "test"], 1, style)
    dataset = data.load(tmp_path / "x")
    assert names(dataset, "val") == [("valid/wet_NA/0.jpg", "wet NA"),
                                     ("valid/wet_test/0.jpg", "wet test")]
    assert len(dataset.every_image) == 6 and not missing_photos(dataset)
    # Elsewhere these names are those of states.
    data.make_split(photos(tmp_path / "y", ["train", "test", "new"]))
    assert "train" in data.load(tmp_path / "y").states


def test_make_split_cuts_a_missing_set_out_of_train(tmp_path, capsys):
    photos(tmp_path / "train", ["wet", "dry", "old"], ["cat", "dog", "hat"])
    photos(tmp_path / "validation")
    assert "in the set 'test'; " in check(capsys, tmp_path)[1]
    assert "(test cut out of train, seed 0" in check(capsys, tmp_path, "--make-split")[1]
    dataset = data.load(tmp_path)
    tops = {phase: {image.split("/")[0] for image in images}
            for phase, images in dataset.images.items()}
    assert tops == {"train": {"train"}, "val": {"validation"}, "test": {"train"}}
    assert len(dataset.images["val"]) == 32 and len(dataset.every_image) == 104
    assert not dataset.seen.all()


def test_make_split_prints_names_and_notes_what_looks_split_at_the_wrong_place(tmp_path, capsys):
    photos(tmp_path, ["light", "dark"], ["hat", "blue_hat", "straw hat"], style="{}_{}")
    output = check(capsys, tmp_path, "--make-split")[1].splitlines()
    assert output[:2] == ["states: dark, light", "objects: blue_hat, hat, straw hat"]
    assert [line for line in output if line.startswith("note: object")] == [
        'note: object "blue_hat" ends in the name of another object, "hat": if the rest belongs '
        "to the state, write STATE__OBJECT/ or STATE/OBJECT/"]


def test_folders_that_name_no_composition(tmp_path):
    for folder in ("a/b/c", "a"):
        touch(tmp_path / folder / "1.jpg")
        with pytest.raises(ValueError, match=f"folders, found {folder}/1.jpg"):
            data.make_split(tmp_path)


def test_make_split_of_a_table_keeps_its_rows_and_columns(tmp_path):
    rows = [f'{i}.jpg,{"ab"[i % 2]},{"cd"[i % 3 // 2]},"two\nlines, {i}"' for i in range(24)]
    table(tmp_path, "\n".join(["image,state,object,comment", *rows]))
    data.make_split(tmp_path)
    made = list(data.read_table(tmp_path / "images.csv"))
    assert list(made[0]) == ["image", "state", "object", "comment", "split"]
    assert [row["comment"] for row in made] == [f"two\nlines, {i}" for i in range(24)]
    with pytest.raises(ValueError, match="or rows in images.csv, found none"):
        data.make_split(table(tmp_path, "image,state,object"))


def test_divide():
    splits = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        pairs = [(f"s{s}", f"o{o}") for s, o in rng.integers([9, 7], size=(600, 2))]
        for share in (0.1, 0.2):
            split = data.assign_splits(pairs, seed, share)
            splits += split
            train, val, test = [shown(pairs, split, phase) for phase in data.PHASES]
            assert primitives(train) == primitives(pairs)
            assert len(val - train) == len(test - train) == round(share * len(set(pairs)))
            assert not (val - train) & (test - train)
            times = Counter(phase for pair, phase in zip(pairs, split) if pair in train)
            assert times["val"] == times["test"] == round(0.15 * times.total())
    # The draws themselves: who makes a split anew gets the one that results were made with.
    assert hashlib.md5(" ".join(splits).encode()).hexdigest() == DRAWN_SPLITS


def test_divide_few_images_of_few_compositions():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        few = [(f"s{s}", f"o{o}") for s, o in rng.integers(4, size=(7, 2))]
        pairs = [pair for pair in few for _ in range(rng.integers(1, 4))] + [("s", "o")] * 4
        split = data.assign_splits(pairs, seed)
        assert set(split) == set(data.PHASES)
        assert primitives(shown(pairs, split, "train")) == primitives(pairs)
    with pytest.raises(ValueError, match="2 images of 2 compositions: too few"):
        data.assign_splits([("a", "x"), ("b", "y")])


# ---- drawings ------------------------------------------------------------------------------------


def test_of_two_that_draw_at_once_both_go_on(tmp_path, monkeypatch):
    """The first ends within the second's drawing."""
    first = tmp_path / "shapes/images.csv"

    def fill(part):
        first.parent.mkdir()
        first.touch()

    monkeypatch.setattr(drawings, "fill", fill)
    drawings.ensure(first.parent)
    assert list(tmp_path.rglob("*")) == [first.parent, first]


def test_a_drawing_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawings.ensure(tmp_path / "shapes")
    assert not list(tmp_path.iterdir())


def test_the_data_are_those_that_the_reports_were_made_with(tmp_path, monkeypatch):
    """Of every composition, to the byte, as drawings.py drew it before it was rewritten."""
    monkeypatch.setattr(drawings, "IMAGES", dict(train=1, seen=0, unseen=1))
    drawings.ensure(tmp_path / "shapes")
    digest = hashlib.md5()
    for path in sorted((tmp_path / "shapes").rglob("*")):
        if path.suffix == ".png":  # by its pixels, since libraries compress differently
            digest.update(Image.open(path).tobytes())
        elif path.suffix in (".csv", ".txt"):
            digest.update(path.read_bytes().replace(b"\n", DRAWN_LINE_END[path.suffix]))
    assert digest.hexdigest() == DRAWN_DATA
