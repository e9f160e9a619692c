"""Tests of data.py and drawings.py: layouts, odd rows, checks, splits, what people bring.

On folders made here, and on the real lists of ../shared where it is.
"""

import io
import itertools
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
import data
import drawings
import features

SHARED = Path(__file__).parent / "../../shared/data"
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


def publish(folder, lists=LISTS, rows=ROWS, photos=True):
    """A folder in the shared layout."""
    (folder / data.SPLIT).mkdir(parents=True)
    for phase, pairs in lists.items():
        (folder / data.SPLIT / f"{phase}_pairs.txt").write_text("\n".join(pairs))
    keys = "image", "attr", "obj", "set"
    torch.save([dict(zip(keys, row)) for row in rows], folder / f"metadata_{data.SPLIT}.t7")
    for image, *_ in rows if photos else []:
        touch(folder / "images" / image)
    return folder


def touch(file):
    """A photo of one pixel, whatever its suffix says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (1, 1)).save(file, "PNG")


def table(folder, rows, header="image,state,object,split"):
    """A folder of own data."""
    folder.mkdir(exist_ok=True)
    (folder / "images.csv").write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    return folder


def names(dataset, phase):
    """(image, state, object) of a phase, spelt out."""
    spelt = []
    for image, target in zip(dataset.images[phase], dataset.targets[phase]):
        s, o = divmod(int(target), len(dataset.objects))
        spelt.append((image, dataset.states[s], dataset.objects[o]))
    return spelt


def shown(pairs, split):
    """phase -> the set of compositions that its images show."""
    return {
        phase: {pair for pair, its_phase in zip(pairs, split) if its_phase == phase}
        for phase in data.PHASES
    }


def primitives(pairs):
    """(states, objects) of some compositions, as sets."""
    return {state for state, _ in pairs}, {object_ for _, object_ in pairs}


def check(capsys, *arguments):
    """Exit status and output of `python data.py`."""
    try:
        status = data.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_shared_layout_by_name_and_by_path(tmp_path):
    folder = publish(tmp_path / "mit-states")
    for dataset in (
        data.load("mitstates", tmp_path),
        data.load(folder),
        data.load("mit-states", tmp_path),
    ):
        assert dataset.name == "mitstates" and dataset.folder == folder
        assert dataset.states == ["dry", "old", "wet"] and dataset.objects == [
            "Shoes.Flats",
            "cat",
            "dog",
        ]
        assert not dataset.notes and dataset.feasible is None
        assert (
            dataset.pairs["test"].tolist() == [[0, 0], [1, 2], [2, 2]]
            and dataset.pairs["test"].dtype == np.int64
        )
        for phase in data.PHASES:
            assert names(dataset, phase) == [row[:3] for row in ROWS if row[3] == phase]
            assert dataset.targets[phase].dtype == np.int64
        assert dataset.seen.tolist() == [
            [False, True, False],
            [True, False, False],
            [False, True, True],
        ]
        assert np.flatnonzero(dataset.candidates("val") & ~dataset.seen.ravel()).tolist() == [2]
        assert np.flatnonzero(dataset.candidates("test") & ~dataset.seen.ravel()).tolist() == [0, 5]
        assert np.array_equal(dataset.candidates("train"), dataset.seen.ravel())


def test_random_folders_equal_the_definition(tmp_path):
    for seed in range(20):
        rng = random.Random(seed)
        every = [f"s{s} o{o}" for s in range(12) for o in range(4)]
        lists = {phase: rng.sample(every, 20) for phase in data.PHASES}
        rows = [
            (
                f"{i}.jpg",
                *rng.choice(every + ["NA NA", "s3 NA"]).split(),
                rng.choice([*data.PHASES, "NA"]),
            )
            for i in range(400)
        ]
        dataset = data.load(publish(tmp_path / str(seed), lists, rows, photos=False))
        listed = set().union(*lists.values())
        assert dataset.states == sorted({pair.split()[0] for pair in listed})  # s10 before s2
        for phase in data.PHASES:
            kept = [row[:3] for row in rows if f"{row[1]} {row[2]}" in listed and row[3] == phase]
            assert names(dataset, phase) == kept
            spelt = [f"{dataset.states[s]} {dataset.objects[o]}" for s, o in dataset.pairs[phase]]
            assert spelt == sorted(lists[phase], key=str.split)
        shown = {f"{row[1]} {row[2]}" for row in rows if row[3] == "train"} & listed
        seen = {
            f"{dataset.states[s]} {dataset.objects[o]}" for s, o in zip(*np.nonzero(dataset.seen))
        }
        assert seen == shown | set(lists["train"])
        skipped = sum(int(note.split()[0]) for note in dataset.notes if note.endswith("skipped"))
        assert skipped == 400 - sum(len(images) for images in dataset.images.values())


def test_the_set_and_not_the_pair_says_where_an_image_belongs(tmp_path):
    rows = ROWS + [
        ("10.jpg", "dry", "dog", "test"),
        ("11.jpg", "old", "dog", "train"),
        ("12.jpg", "old", "dog", "val"),
    ]
    dataset = data.load(publish(tmp_path / "x", rows=rows))
    assert [dataset.images[phase][-1] for phase in data.PHASES] == ["11.jpg", "12.jpg", "10.jpg"]
    assert dataset.seen[1, 2] and len(dataset.pairs["train"]) == 4 and dataset.candidates("val")[5]
    assert not dataset.candidates("test")[2]  # dry dog: of the val list alone
    assert dataset.notes == [
        "1 composition with training images but not in the training list, taken as seen",
        "1 test image of pairs in neither the test nor the training list: a ceiling of 75.0% in "
        "the closed world",
    ]


def test_odd_lists_and_names(tmp_path):
    folder = publish(
        tmp_path / "x",
        rows=[(".\\a\\1.jpg", *ROWS[0][1:]), ("./a b/2.1.jpg", *ROWS[1][1:]), *ROWS[2:]],
    )
    lines = ["\ufeffwet cat ", "wet dog\t", "dry   cat", "old Shoes.Flats", "wet dog", "wet dog"]
    odd = "\r\n".join([*lines, "", "  ", ""])
    (folder / data.SPLIT / "train_pairs.txt").write_bytes(odd.encode())
    dataset = data.load(folder)
    assert dataset.images["train"][:3] == ["a/1.jpg", "a b/2.1.jpg", "b c/3.x.jpg"]
    assert len(dataset.pairs["train"]) == 4 and dataset.states == ["dry", "old", "wet"]
    assert dataset.notes == ["train_pairs.txt repeats 2 pairs: each counts once"]


def test_what_training_never_shows_is_kept_counted_and_bounds_accuracy(tmp_path):
    lists = {
        **LISTS,
        "train": [*LISTS["train"], "new car", "old cat"],
        "val": [*LISTS["val"], "odd cat"],
    }
    rows = [*ROWS, ("x.jpg", "odd", "cat", "val"), ("y.jpg", "new", "car", "test")]
    dataset = data.load(publish(tmp_path / "x", lists, rows))
    assert dataset.states == ["dry", "new", "odd", "old", "wet"] and dataset.seen.sum() == 6
    assert dataset.notes == [
        "2 training pairs without a training image, kept as seen",
        "2 states without a training image (new, odd): an accuracy ceiling of 66.7% of val and "
        "75.0% of test",
        "1 object without a training image (car): an accuracy ceiling of 100.0% of val and "
        "75.0% of test",
    ]


def test_images_in_two_sets_and_all_seen_are_noted(tmp_path):
    rows = [row if row[3] == "train" else ("same.jpg", "wet", "cat", row[3]) for row in ROWS]
    assert data.load(publish(tmp_path / "x", rows=rows)).notes == [
        "no val image shows an unseen composition: only the seen half can be evaluated",
        "no test image shows an unseen composition: only the seen half can be evaluated",
        "1 val row repeating an image and its composition: each row counts",
        "2 test rows repeating an image and its composition: each row counts",
        "1 image in more than one set",
    ]


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / data.SPLIT / "val_pairs.txt").unlink(), ["val_pairs.txt is missing"]),
        (lambda f: (f / data.SPLIT / "val_pairs.txt").write_text("\n"), ["val_pairs.txt is empty"]),
        (
            lambda f: (f / data.SPLIT / "val_pairs.txt").write_text("wet dog\nwet\nwet old dog"),
            ["line 2 'wet'", "line 3"],
        ),
        (
            lambda f: (f / data.SPLIT / "val_pairs.txt").write_bytes(b"n\xe4sse dog"),
            ["val_pairs.txt is not in UTF-8"],
        ),
        (
            lambda f: (f / data.SPLIT / "val_pairs.txt").write_text("<!doctype html>\n<html>\n"),
            ["val_pairs.txt is a web page"],
        ),
        (
            lambda f: torch.save(
                [dict(image="1", attr=None, obj="dog", set="val")], f / f"metadata_{data.SPLIT}.t7"
            ),
            [f"metadata_{data.SPLIT}.t7 is no torch.save", "found a NoneType, expected a name"],
        ),
        (lambda f: (f / f"metadata_{data.SPLIT}.t7").unlink(), ["t7 is missing"]),
        (
            lambda f: (f / f"metadata_{data.SPLIT}.t7").write_text("<html>"),
            ["no torch.save of a list of dicts"],
        ),
        (
            lambda f: torch.save([{"image": "1"}], f / f"metadata_{data.SPLIT}.t7"),
            ["attr, obj, set (KeyError: 'attr')"],
        ),
        (
            lambda f: torch.save([1, Counter], f / f"metadata_{data.SPLIT}.t7"),
            ["no torch.save of a list"],
        ),
        (
            lambda f: (f / "feasible_pairs.txt").write_text("wet cat\nwet bird\n"),
            ["1 pair of other states or objects"],
        ),
        (
            lambda f: [
                (f / data.SPLIT / f"{phase}_pairs.txt").unlink() for phase in ("train", "val")
            ],
            ["train_pairs.txt is missing; val_pairs.txt is missing"],
        ),
    ],
)
def test_obstacles_of_the_shared_layout(tmp_path, capsys, damage, words):
    folder = publish(tmp_path / "x")
    damage(folder)
    with pytest.raises(ValueError) as error:
        data.load(folder)
    status, output = check(capsys, folder)
    assert status == 1 and "states" in output and "Traceback" not in output
    assert all(word in str(error.value) for word in words)
    assert all(word in output for words in words for word in words.split("; "))


def test_empty_sets_and_metadata_of_other_pairs(tmp_path):
    with pytest.raises(
        ValueError,
        match="no image is left in the set 'val': .*; no image is left in the set 'test': ",
    ):
        rows = [row if row[3] == "train" else (row[0], "NA", *row[2:]) for row in ROWS]
        data.load(publish(tmp_path / "a", rows=rows))
    with pytest.raises(ValueError, match="none of 2 rows names a listed pair"):
        data.load(
            publish(
                tmp_path / "b",
                rows=[("1.jpg", "Wet", "cat", "train"), ("2.jpg", "wet", "Dog", "val")],
            )
        )
    with pytest.raises(
        ValueError, match="neither compositional-split-natural/ nor images.csv.*--make-split"
    ):
        data.load(tmp_path)


def test_a_name_of_ones_own_is_not_to_be_downloaded(tmp_path, monkeypatch):
    """A line in FOLDERS is enough; where its folder is not, --data-root is what can help."""
    monkeypatch.setitem(data.FOLDERS, "birds", "my-birds")
    with pytest.raises(FileNotFoundError, match="no folder .*my-birds; --data-root") as error:
        data.load("birds", tmp_path)
    assert "download" not in str(error.value) and "images.csv" in str(error.value)


def test_unknown_names_and_missing_folders(tmp_path, capsys):
    for name, words in (
        ("utzappos", "python download.py utzappos"),
        ("zappo", "utzappos, mitstates, cgqa"),
    ):
        with pytest.raises(FileNotFoundError, match=words):
            data.load(name, tmp_path)
        status, output = check(capsys, name, "--data-root", tmp_path)
        assert status == 2 and output.startswith("error: no dataset")
        assert output.count("\n") == (6 if name == "utzappos" else 1)


def test_feasible_pairs(tmp_path):
    folder = publish(tmp_path / "x")
    (folder / "feasible_pairs.txt").write_text("wet cat\nwet dog\nold dog\n")
    feasible = data.load(folder).feasible
    assert feasible.dtype == bool and feasible.shape == (3, 3)
    assert np.argwhere(feasible).tolist() == [[1, 2], [2, 1], [2, 2]]


def test_images_csv(tmp_path):
    rows = [
        ("./a/1.jpg", "dark red", "car", "train"),
        (" a\\2.jpg ", "blue", "bus", "Training"),
        ("3.jpg", "blue", "car", "val"),
        ("4.jpg", "dark red", "bus", "test"),
        ("5.jpg", "NA", "car", "test"),
        ("6.jpg", "blue", "car", "validation"),
    ]
    comma = table(tmp_path / "comma", rows)
    semicolon = tmp_path / "semicolon"
    semicolon.mkdir()
    swapped = "".join(f"{split};x;{o};{s};{image}\r\n" for image, s, o, split in rows)
    (semicolon / "images.csv").write_bytes(
        f"\ufeffSplit;Comment;object;state;image\r\n{swapped}\r\n".encode()
    )
    for folder in comma, semicolon:
        dataset = data.load(folder)
        assert dataset.name == folder.name and dataset.notes[0] == "1 row with NA skipped"
        assert all("shows a seen composition" in note for note in dataset.notes[1:])
        assert names(dataset, "train") == [
            ("a/1.jpg", "dark red", "car"),
            ("a/2.jpg", "blue", "bus"),
        ]
        assert names(dataset, "val") == [("3.jpg", "blue", "car"), ("6.jpg", "blue", "car")]
        assert dataset.pairs["test"].tolist() == [[1, 0]]
    (comma / "images").mkdir()
    touch(comma / "a/1.jpg")
    assert dataset.path("7.jpg") == semicolon / "images/7.jpg"
    assert data.load(comma).path("a/1.jpg") == comma / "a/1.jpg"


def test_quoted_lines_and_separators_of_unicode_stay_in_their_cell(tmp_path, capsys):
    rows = [
        (f"{i}.jpg", state, object_, f'"two\nlines, {i}"')
        for i, (state, object_) in enumerate(
            [
                (s, o)
                for s in ("dark\u2028red", "blue", "green")
                for o in ("car", "bus")
                for _ in range(4)
            ]
        )
    ]
    folder = table(tmp_path / "x", rows, "image,state,object,comment")
    for arguments in ["--make-split"], []:
        check(capsys, folder, *arguments)
    dataset = data.load(folder)
    assert dataset.states == ["blue", "dark\u2028red", "green"] and sum(
        map(len, dataset.images.values())
    ) == len(rows)
    assert (folder / "images.csv").read_text().count('"two\nlines, ') == len(rows)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "images.csv is empty"),
        ("image,state,object,split\n", "expected image,state,object,split and rows"),
        ("file,state,object,split\n1.jpg,wet,dog,train\n", "found 'file,state,object,split'"),
        ("image,state,object\n1.jpg,wet,dog\n", "no column split.*--make-split"),
        ("image,state,object,split\n1.jpg,wet,dog,train\n2.jpg,,dog,val\n", "is empty in row 3"),
        (
            "image,state,object,split\n1.jpg,wet,dog,train\n2.jpg,wet,dog,mine\n3.jpg,wet,dog\n",
            "2.jpg 'mine', 3.jpg ''",
        ),
        (
            "image,state,object,split\n1.jpg,wet,dog,train\n2.jpg,wet,dog,test\n",
            "no image is left in the set 'val'",
        ),
        (
            'image,state,object,split\n1.jpg,"' + "x" * 200_000,
            "images.csv after line 1: field larger",
        ),
    ],
)
def test_obstacles_of_images_csv(tmp_path, text, words):
    (tmp_path / "images.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        data.load(tmp_path)


def test_check_prints_counts_and_every_problem(tmp_path, capsys):
    folder = publish(tmp_path / "cgqa", rows=[*ROWS, ("10.jpg", "NA", "dog", "val")])
    status, output = check(capsys, "cgqa", "--data-root", tmp_path)
    assert status == 0
    assert output.splitlines() == [
        "cgqa: 3 states, 3 objects, 9 compositions; 7 listed, 2 in no list",
        "                seen  unseen    images   of seen of unseen",
        "train              4       0         4         4         0",
        "val                1       1         2         1         1",
        "test               1       2         3         1         2",
        "note: 1 row with NA skipped",
        f"next: python compcos.py --dataset cgqa --data-root {tmp_path} --vectors random   "
        "# better: a file of word vectors, or glove, word2vec, fasttext (see download.py)",
    ]
    for image in "5.jpg", "a/1.jpg":
        (folder / "images" / image).unlink()
    (folder / data.SPLIT / "test_pairs.txt").unlink()
    (folder / "features.npz").write_text("no zip")
    status, output = check(capsys, folder)
    problems = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert status == 1 and len(problems) == 3 and "test_pairs.txt is missing" in problems[0]
    assert "features.npz: not a NumPy .npz archive" in problems[1]
    assert "2 of 7 images" in problems[2] and problems[2].endswith("a/1.jpg, 5.jpg")


@pytest.mark.parametrize(
    "save",
    [
        lambda folder, files: np.savez(
            folder / "features.npz", files=files, features=np.zeros((len(files), 4))
        ),
        lambda folder, files: torch.save(
            {"files": files, "features": torch.ones(len(files), 4)},
            folder / "resnet18_featurers.t7",
        ),
    ],
)
def test_features_do_instead_of_images(tmp_path, capsys, save):
    folder = publish(tmp_path / "x", photos=False)
    save(folder, [f".\\{row[0]}" for row in ROWS])
    assert check(capsys, folder)[0] == 0
    save(folder, [row[0] for row in ROWS[1:]])
    status, output = check(capsys, folder)
    assert status == 1 and output.count("problem: ") == 1
    assert f"1 of 9 images not found in {folder}" in output and output.endswith(": a/1.jpg\n")


@pytest.mark.parametrize(
    "style, root", [("{}_{}", "."), ("{}/{}", "."), ("{}_{}", "images"), ("{}/{}", "images")]
)
def test_make_split_of_photos_in_folders(tmp_path, capsys, style, root):
    states, objects = ["wet", "dry", "old"], ["cat", "garden hose", "Shoes.Flats", "big_dog"]
    every = {(s, o) for s in states for o in objects}
    for state, object_ in every:
        for number in range(8):
            touch(tmp_path / root / style.format(state, object_) / f"{number}.5 x.JPG")
    touch(tmp_path / root / ".cache" / "x.jpg")
    touch(tmp_path / root / "wet_cat" / "Thumbs.db")
    status, output = check(capsys, tmp_path, "--make-split")
    assert status == 0 and ("the first _ ends" in output) == ("_" in style)
    dataset = data.load(tmp_path)
    assert sum(map(len, dataset.images.values())) == 96 and not list(tmp_path.glob(".*.part"))
    assert {(s, o) for phase in data.PHASES for _, s, o in names(dataset, phase)} == every
    assert all(
        dataset.path(image).is_file() for images in dataset.images.values() for image in images
    )
    assert dataset.seen.any(0).all() and dataset.seen.any(1).all() and dataset.seen.sum() == 8
    val, test = (
        set(dataset.targets[phase]) - set(dataset.targets["train"]) for phase in ("val", "test")
    )
    assert len(val) == len(test) == 2 and not val & test
    assert check(capsys, tmp_path, "--make-split")[0] == 2  # never over an existing split


def test_first_underscore_splits_and_says_so(tmp_path, capsys):
    for pair in "dark_blue_car", "red_car", "dark_bus", "red_bus":
        for number in range(4):
            touch(tmp_path / pair / f"{number}.png")
    status, output = check(capsys, tmp_path, "--make-split")
    assert status == 0 and "the first _ ends the state's name in dark_blue_car;" in output
    assert data.load(tmp_path).objects == ["blue_car", "bus", "car"]
    touch(tmp_path / "loose.png")
    touch(tmp_path / "car" / "1.png")
    (tmp_path / "images.csv").unlink()
    status, output = check(capsys, tmp_path, "--make-split")
    assert status == 2 and "found 2 photos elsewhere: car/1.png, loose.png" in output
    assert not (tmp_path / "images.csv").exists()


def test_make_split_of_a_table_keeps_its_rows_and_columns(tmp_path, capsys):
    rows = [
        (f"{s} {o}{i}.jpg", s, o, f"note {i}")
        for s in ("wet", "dry")
        for o in ("cat", "dog")
        for i in range(6)
    ]
    made = []
    for name, seed in ("a", 0), ("b", 0), ("c", 1):
        folder = table(tmp_path / name, rows, "image,state,object,comment")
        check(capsys, folder, "--make-split", "--seed", seed)
        made.append((folder / "images.csv").read_text().splitlines())
    assert made[0] == made[1] != made[2] and made[0][0] == "image,state,object,comment,split"
    assert [tuple(line.split(",")[:4]) for line in made[0][1:]] == rows


def test_divide():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        pairs = [(f"s{s}", f"o{o}") for s, o in rng.integers([9, 7], size=(600, 2))]
        split = data.divide(pairs, seed)
        own = shown(pairs, split)
        assert primitives(own["train"]) == primitives(pairs)
        unseen = [own[phase] - own["train"] for phase in ("val", "test")]
        assert (
            len(unseen[0]) == len(unseen[1]) == round(0.2 * len(set(pairs)))
            and not unseen[0] & unseen[1]
        )
        assert all(its == "val" for pair, its in zip(pairs, split) if pair in unseen[0])
        old = Counter(its for pair, its in zip(pairs, split) if pair in own["train"])
        assert old["val"] == old["test"] == round(0.15 * old.total())


def test_divide_few_images_of_few_compositions():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        few = [(f"s{s}", f"o{o}") for s, o in rng.integers(4, size=(7, 2))]
        pairs = [pair for pair in few for _ in range(rng.integers(1, 4))] + [("s", "o")] * 4
        split = data.divide(pairs, seed)
        own = shown(pairs, split)
        assert primitives(own["train"]) == primitives(pairs)
        held = set(pairs) - own["train"]
        assert not held & own["val"] & own["test"]
        left = {part: Counter(pair[part] for pair in own["train"]) for part in (0, 1)}
        more = [pair for pair in own["train"] if left[0][pair[0]] > 1 and left[1][pair[1]] > 1]
        assert len(held) == 2 or not more  # as many as wanted, or as can be


def test_no_unseen_composition_possible(tmp_path, capsys):
    table(
        tmp_path, [(f"{i}.jpg", f"s{i % 3}", f"o{i % 3}") for i in range(30)], "image,state,object"
    )
    for i in range(30):
        touch(tmp_path / f"{i}.jpg")
    status, output = check(capsys, tmp_path, "--make-split")
    assert (
        status == 0
        and "note: no test image shows an unseen composition: only the seen half" in output
    )
    dataset = data.load(tmp_path)
    assert dataset.seen.sum() == 3 and [len(dataset.images[phase]) for phase in data.PHASES] == [
        22,
        4,
        4,
    ]
    with pytest.raises(ValueError, match="2 images of 2 compositions: too few"):
        data.divide([("a", "x"), ("b", "y")])


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared")
@pytest.mark.parametrize(
    "folder, counts",
    [
        (
            "ut-zap50k",
            [
                "utzappos: 16 states, 12 objects, 192 compositions; 116 listed, 76 in no list",
                "train 83 0",
                "val 15 15",
                "test 18 18",
            ],
        ),
        (
            "cgqa",
            [
                "cgqa: 413 states, 674 objects, 278,362 compositions; 7,767 listed",
                "train 5,592 0",
                "val 1,040 1,252",
                "test 888 923",
            ],
        ),
        (
            "mit-states",
            [
                "mitstates: 115 states, 245 objects, 28,175 compositions; 1,962 listed, "
                "26,213 in no list",
                "train 1,262 0",
                "problem: val_pairs.txt is missing",
                "problem: test_pairs.txt is missing",
            ],
        ),
    ],
)
def test_published_lists(capsys, folder, counts):
    status, output = check(capsys, SHARED / "splits" / folder)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert status == 1 and "t7 is missing" in lines[-1]
    assert all(any(line.startswith(count) for line in lines) for count in counts)


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared")
def test_textures_with_their_file_of_features(capsys):
    status, output = check(
        capsys, SHARED / "textures/split1", "--features", SHARED / "textures/features.npz"
    )
    assert (
        status == 0
        and f"--features {SHARED / 'textures/features.npz'}" in output
        and "problem" not in output
    )
    status, output = check(
        capsys, SHARED / "textures/split1", "--features", SHARED / "fashion/features.npz"
    )
    assert status == 1 and "1,280 of 1,280 images not found in" in output


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared")
def test_fashion(capsys):
    dataset = data.load("fashion", SHARED)
    assert (len(dataset.states), len(dataset.objects), dataset.seen.sum()) == (
        36,
        71,
        490,
    ) and not dataset.notes
    assert [len(dataset.images[phase]) for phase in data.PHASES] == [8355, 4967, 6555]
    assert [dataset.candidates(phase).sum() - 490 for phase in data.PHASES] == [0, 130, 165]
    assert check(capsys, "fashion", "--data-root", SHARED)[0] == 0


# ---- whatever people bring -----------------------------------------------------------------------


def photo(file, size=(4, 3)):
    """A photo in the format of its suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 30, 30)).save(file)


def photos(folder, states=("wet", "dry"), objects=("cat", "dog"), number=4, style="{}_{}"):
    """A folder of photos, of one pixel each."""
    for state in states:
        for object_ in objects:
            for i in range(number):
                touch(folder / style.format(state, object_) / f"{i}.jpg")
    return folder


def test_every_photo_format_is_taken_and_the_rest_counted(tmp_path, capsys):
    photos(tmp_path / "x")
    taken = ["a.jfif", "a.jpe", "a.ppm", "a.jp2", "a.TIF", "a.webp", "a.bmp", "a.gif", "a.avif"]
    taken = [name for name in taken if Path(name).suffix.lower() in data.photo_suffixes()]
    assert {"a.jfif", "a.jpe", "a.ppm", "a.TIF", "a.bmp", "a.gif"} <= set(taken)
    for name in taken:
        photo(tmp_path / "x/wet_cat" / name)
    for name in "wet_fox/1.xyz", "wet_fox/2.xyz", "wet_cat/1.pdf", "wet_cat/1.eps", "wet_cat/notes":
        touch(tmp_path / "x" / name)
    for name in ".DS_Store", "._1.jpg", "Thumbs.db", "@eaDir/1.jpg", "@eaDir/SYNO@.x":
        touch(tmp_path / "x/wet_cat" / name)
    status, output = check(capsys, tmp_path / "x", "--make-split")
    assert status == 0
    assert sum(map(len, data.load(tmp_path / "x").images.values())) == 16 + len(taken)
    notes = [line for line in output.splitlines() if "left out" in line]
    assert notes == [
        "note: 5 files left out, which Pillow does not open as photos here: 2 .xyz, 1 .eps, "
        "1 .pdf, 1 without suffix; nothing is left of wet_fox; save photos among them as JPEG or "
        "PNG"
    ]


def test_photos_beside_the_folder_of_images_are_not_lost_without_a_word(tmp_path, capsys):
    photos(tmp_path / "images", ["wet"])
    photos(tmp_path, ["dry"], ["cat"], number=1)
    output = check(capsys, tmp_path, "--make-split")[1]
    assert "note: beside images/, which alone counts, 1 photo: dry_cat/0.jpg\n" in output
    assert data.load(tmp_path).states == ["wet"]


def test_a_plugin_is_named_for_what_stays_out(tmp_path, capsys):
    photos(tmp_path / "x")
    touch(tmp_path / "x/wet_cat/1.zzz")
    note = data.what_stayed_out([], ["wet_cat/1.HEIC", "wet_cat/1.heif"])
    assert (
        "1 .heic, 1 .heif" in note
        and "`pip install pillow-heif`, or save them as JPEG or PNG" in note
    )


def test_links_to_folders_are_followed_once_around(tmp_path, capsys):
    photos(tmp_path / "elsewhere/store", ["wet"])
    photos(tmp_path / "x", ["dry"])
    for name in "wet_cat", "wet_dog":
        (tmp_path / "x" / name).symlink_to(tmp_path / "elsewhere/store" / name)
    (tmp_path / "x/dry_cat/round").symlink_to(tmp_path / "x")
    (tmp_path / "x/dry_cat/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    found, left_out = data.photo_files(tmp_path / "x")
    assert len(found) == 16 and left_out == ["dry_cat/gone.jpg"]
    said = data.what_stayed_out(found, left_out)
    assert "1 .jpg (photos among these are links to nothing);" in said
    assert check(capsys, tmp_path / "x", "--make-split")[0] == 0


@pytest.mark.parametrize(
    "folder, names",
    [
        ("wet_dog", ("wet", "dog")),
        ("wet__dog", ("wet", "dog")),
        ("Potato___healthy", ("Potato", "healthy")),
        ("Corn_(maize)___Common_rust_", ("Corn_(maize)", "Common_rust")),
        ("wet _dog", ("wet", "dog")),
    ],
)
def test_one_reading_of_folder_names(tmp_path, folder, names):
    photos(tmp_path, ["a"], ["b"])
    touch(tmp_path / folder / "1.jpg")
    rows = data.read_photos(tmp_path)
    assert {(row["state"], row["object"]) for row in rows} == {("a", "b"), names}


def test_names_that_differ_in_case_or_blanks_are_noted_with_both(tmp_path):
    rows = [
        ("1.jpg", "Wet", "cat", "train"),
        ("2.jpg", "wet", "T shirt", "train"),
        ("3.jpg", "wet", "T_shirt", "val"),
        ("4.jpg", " wet", "cat  ", "test"),
        ("5.jpg", "Wet", "T  shirt", "test"),
    ]
    dataset = data.load(table(tmp_path, rows))
    assert dataset.states == ["Wet", "wet"] and dataset.objects == ["T shirt", "T_shirt", "cat"]
    assert "the states 'Wet' and 'wet' differ only in case" in dataset.notes[0]
    assert "the objects 'T shirt' and 'T_shirt' differ only in case" in dataset.notes[1]


def test_decomposed_names_are_one_with_composed_ones(tmp_path):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    rows = [
        (f"{decomposed}/1.jpg", composed, "cat", "train"),
        (f"{composed}/2.jpg", decomposed, "dog", "val"),
        ("3.jpg", composed, "cat", "test"),
        (f"{composed}/{composed}.jpg", composed, "cat", "test"),
        (f"{composed}/{composed}/4.jpg", composed, "cat", "test"),
    ]
    table(tmp_path, rows)
    mixed = f"{decomposed}/{composed}.jpg", f"{composed}/{decomposed}/4.jpg"
    for name in (f"{decomposed}/1.jpg", f"{decomposed}/2.jpg", "3.jpg", *mixed):
        touch(tmp_path / "images" / name)
    dataset = data.load(tmp_path)
    assert (
        dataset.states == [composed]
        and not data.missing_files(dataset)
        and not data.unnamed_photos(dataset)
    )


def test_tab_or_comma_between_names_with_blanks(tmp_path):
    lists = {
        "train": ["dark red\tcar", "dark red, garden hose", "wet,car"],
        "val": ["wet\tgarden hose"],
        "test": ["wet dog"],
    }
    rows = [
        ("1.jpg", "dark red", "car", "train"),
        ("2.jpg", "dark red", "garden hose", "train"),
        ("3.jpg", "wet", "car", "train"),
        ("4.jpg", "wet", "garden hose", "validation"),
        ("5.jpg", "wet", "dog", "Testing"),
    ]
    folder = publish(tmp_path / "x", lists, rows)
    (folder / "feasible_pairs.txt").write_text("dark red\tcar\nwet, garden hose\nwet dog\n")
    dataset = data.load(folder)
    assert dataset.states == ["dark red", "wet"] and dataset.objects == [
        "car",
        "dog",
        "garden hose",
    ]
    assert np.argwhere(dataset.feasible).tolist() == [[0, 0], [1, 1], [1, 2]]
    assert [len(dataset.images[phase]) for phase in data.PHASES] == [3, 1, 1]


def test_ceilings_of_images_with_several_compositions(tmp_path):
    """4 rows of one val image, 2 of them alike, and 1 of another: one answer each meets 3 of 5."""
    val = [
        ("v.jpg", "wet", "cat", "val"),
        ("v.jpg", "wet", "cat", "val"),
        ("v.jpg", "dry", "dog", "val"),
        ("v.jpg", "old", "dog", "val"),
        ("w.jpg", "dry", "dog", "val"),
    ]
    rows = [row for row in ROWS if row[3] != "val"] + val
    notes = data.load(
        publish(tmp_path / "x", {**LISTS, "val": [*LISTS["val"], "old dog"]}, rows)
    ).notes
    assert notes == [
        "1 val image with more than one composition: an accuracy ceiling of 60.0% of val",
        "1 val row repeating an image and its composition: each row counts",
    ]


def test_no_seen_image_is_noted_as_no_unseen_one_is(tmp_path):
    rows = [row for row in ROWS if row[0] not in ("5.jpg",)]
    assert data.load(publish(tmp_path / "x", rows=rows)).notes == [
        "no val image shows a seen composition: only the unseen half can be evaluated"
    ]


def test_what_lies_outside_its_closed_world_is_usable_with_a_note(tmp_path, capsys):
    """As on the published C-GQA: no error, and a note that gives the ceiling."""
    rows = [*ROWS, ("10.jpg", "old", "cat", "val")]
    folder = publish(tmp_path / "x", {**LISTS, "test": [*LISTS["test"], "old cat"]}, rows)
    status, output = check(capsys, folder)
    assert status == 0 and "a ceiling of 66.7% in the closed world" in output


def test_csv_as_spreadsheets_write_it(tmp_path):
    lines = [
        "sep=;",
        "Image;Attr;Obj;Set",
        "1.jpg;wet;cat;training",
        "2.jpg;dry;dog;Validation",
        "3.jpg;wet;dog;testing",
        "4.jpg;dry;cat;train",
        ";;;",
        ";;;",
        "",
    ]
    (tmp_path / "images.csv").write_text("\r\n".join(lines))
    dataset = data.load(tmp_path)
    assert names(dataset, "train") == [("1.jpg", "wet", "cat"), ("4.jpg", "dry", "cat")]
    assert [len(dataset.images[phase]) for phase in data.PHASES] == [2, 1, 1]
    (tmp_path / "images.csv").write_text("sep=;\nimage;state;object;split\n1.jpg;wet;;train\n")
    with pytest.raises(ValueError, match="is empty in row 3"):
        data.load(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp1252"])
def test_other_encodings_say_what_to_save_as(tmp_path, encoding):
    (tmp_path / "images.csv").write_bytes(
        "image,state,object,split\n1.jpg,n\u00e4sse,dog,train\n".encode(encoding)
    )
    with pytest.raises(ValueError, match="images.csv is not in UTF-8: save as CSV UTF-8"):
        data.load(tmp_path)


def test_a_zero_byte_is_damage_with_its_line(tmp_path):
    text = "image,state,object,split\n" + 9 * "a.jpg,wet,dog,train\n"
    (tmp_path / "images.csv").write_text(text.replace("train", "tr\0ain", 1))
    problems = []
    assert data.read_csv(tmp_path / "images.csv", problems) == []
    assert "images.csv is damaged: 1 zero byte, the first in line 2, " in problems[0]


def test_a_table_cut_within_its_last_row_is_reported(tmp_path):
    """At whatever byte; where it ends with a row it is a whole, shorter table."""
    rows = [f"{phase}{n}.jpg,{pair},{phase}\n" for n, pair in enumerate(("wet,dog", "dry,cat"))
            for phase in data.PHASES]
    text = "image,state,object,split\n" + "".join(rows)
    for end in range(len(text) - len(rows[-1]), len(text) + 1):
        (tmp_path / "images.csv").write_text(text[:end])
        _, problems = data.read(tmp_path)
        left = text[:end].splitlines()[-1]
        is_whole = f"{left}\n" in rows
        assert bool(problems) != is_whole, (left, problems)
        assert all("images.csv" in problem for problem in problems)


def test_a_list_cut_within_its_last_name_is_noted(tmp_path):
    """At whatever byte of the name; the whole name, with or without a line end, is no cut."""
    lists = {**LISTS, "train": [*LISTS["train"], "wet doghouse"]}
    rows = [*ROWS, ("10.jpg", "wet", "doghouse", "train")]
    folder = publish(tmp_path / "x", lists, rows)
    file = folder / data.SPLIT / "train_pairs.txt"
    text = file.read_text() + "\n"
    for cut in range(len("doghouse") + 2):
        file.write_text(text[:len(text) - cut])
        dataset, problems = data.read(folder)
        last = "doghouse\n"[:9 - cut]
        said = [note for note in dataset.notes if "without a line end" in note]
        if last in ("doghouse\n", "doghouse", "dog"):  # of the last one nobody can tell
            assert not said and not problems
        elif last:
            assert len(said) == 1 and not problems
            assert f"train_pairs.txt ends without a line end in {last!r}" in said[0]
        else:
            assert "expected `state object` a line" in problems[0]


def test_numpy_texts_and_numbers_in_metadata(tmp_path):
    folder = publish(tmp_path / "x")
    lists = {phase: [pair.replace("old", "7") for pair in pairs] for phase, pairs in LISTS.items()}
    for phase, pairs in lists.items():
        (folder / data.SPLIT / f"{phase}_pairs.txt").write_text("\n".join(pairs))
    rows = [
        {
            "image": np.str_(image),
            "attr": np.int64(7) if state == "old" else np.str_(state),
            "obj": np.bytes_(object_.encode()),
            "set": phase,
        }
        for image, state, object_, phase in ROWS
    ]
    torch.save(rows, folder / data.METADATA)
    dataset = data.load(folder)
    assert dataset.states == ["7", "dry", "wet"] and sum(map(len, dataset.images.values())) == len(
        ROWS
    )


def test_the_only_list_is_the_metadata_under_any_name(tmp_path):
    folder = publish(tmp_path / "x")
    (folder / data.METADATA).rename(folder / "metadata_mine.t7")
    torch.save({"files": [], "features": torch.zeros(0, 4)}, folder / "resnet18_featurers.t7")
    torch.save(torch.zeros(3), folder / "other.t7")
    assert data.load(folder).notes == [
        f"metadata_mine.t7 is taken as the metadata: there is no {data.METADATA}"
    ]
    torch.save([dict(zip(data.METADATA_KEYS, ROWS[0]))], folder / "second.t7")
    with pytest.raises(ValueError, match=f"{data.METADATA} is missing"):
        data.load(folder)


def test_two_lists_that_may_be_the_metadata_are_named(tmp_path):
    folder = publish(tmp_path / "x")
    content = (folder / data.METADATA).read_bytes()
    (folder / data.METADATA).rename(folder / "a.t7")
    (folder / "b.t7").write_bytes(content)
    dataset, problems = data.read(folder)
    note = f"the metadata may be a.t7, b.t7: give that one the name {data.METADATA}"
    assert note in dataset.notes
    assert "is missing" in problems[0]


def test_content_decides_how_a_feature_file_is_read(tmp_path):
    table = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "a.npz", files=["a.png", "b.png"], features=table)
    (tmp_path / "a.npz").rename(tmp_path / "numpy.pt")
    torch.save({"files": ["a.png", "b.png"], "features": torch.tensor(table)}, tmp_path / "t.npz")
    for name in ("numpy.pt", "t.npz"):
        assert (data.read_features(tmp_path / name)["features"] == table).all()
        assert not data.is_cache(tmp_path / name)
    (tmp_path / "text.t7").write_text("hello")
    with pytest.raises(ValueError, match="no tensors by torch.save, it begins b'hello'"):
        data.read_features(tmp_path / "text.t7")


def test_a_feature_file_that_cannot_be_read_is_one_problem(tmp_path):
    folder = publish(tmp_path / "x", photos=False)
    np.savez(folder / "clip.npz", files=["1.jpg"], features=np.zeros((1, 0)))
    problems = data.missing_files(data.load(folder), folder / "clip.npz")
    assert len(problems) == 1 and "features of 0 numbers" in problems[0]


def test_photos_that_no_row_names_are_listed(tmp_path, capsys):
    folder = publish(tmp_path / "x", rows=[*ROWS, ("10.jpg", "NA", "dog", "val")])
    for name in "new/1.jpg", "2.png", "3.txt":
        touch(folder / "images" / name)
    assert (
        f"note: 2 photos in {folder / 'images'} that no row names: 2.png, new/1.jpg\n"
        in check(capsys, folder)[1]
    )


def test_next_command_is_one_that_can_be_typed(tmp_path, capsys):
    folder = photos(tmp_path / "my photos", number=6)
    output = check(capsys, folder, "--make-split")[1]
    assert f"next: python compcos.py --dataset '{folder}' --vectors random" in output
    (folder / "vectors.txt").touch()
    command = f"next: python compcos.py --dataset '{folder}'"
    assert check(capsys, folder)[1].endswith(f"{command}\n")
    (folder / "vectors.txt").unlink()
    root = ["--data-root", tmp_path]
    (tmp_path / "w2v").mkdir()  # alone it is not what a folder's default needs
    assert " --vectors random" in check(capsys, folder, *root)[1]
    (tmp_path / "fast").mkdir()
    assert check(capsys, folder, *root)[1].endswith(f"{command} --data-root {tmp_path}\n")


def test_a_file_in_place_of_its_folder_is_told(tmp_path, capsys):
    (tmp_path / "images.csv").touch()
    status, output = check(capsys, tmp_path / "images.csv")
    assert status == 2 and f"is a file: name its folder, {tmp_path}" in output


# ---- features ------------------------------------------------------------------------------------


FILES = ["a/1.jpg", "a/2.jpg", "b c/3.jpg"]


@pytest.mark.parametrize("prefix", ["", "./", "images/", "/home/x/images/", "C:\\x\\images\\"])
@pytest.mark.parametrize("suffix", [".npz", ".t7"])
def test_feature_files_may_name_images_with_their_folder(tmp_path, prefix, suffix):
    file = tmp_path / f"f{suffix}"
    files = [prefix + name for name in FILES]
    files[0:0] = ["extra.jpg"]
    if suffix == ".npz":
        np.savez(file, files=files, features=np.eye(4), key="mine")
    else:
        torch.save(
            {"files": np.array(files), "features": torch.eye(4).bfloat16().requires_grad_()}, file
        )
    stored = data.read_features(file, FILES)
    assert stored["files"] == ["extra.jpg", *FILES]
    assert np.array_equal(stored["features"], np.eye(4))


def test_features_of_other_images_stay_what_they_are(tmp_path):
    np.savez(tmp_path / "f.npz", files=["x/a/1.jpg", "a/1.jpg", "a/2.jpg"], features=np.eye(3))
    assert data.read_features(tmp_path / "f.npz", FILES)["files"] == [
        "x/a/1.jpg",
        "a/1.jpg",
        "a/2.jpg",
    ]


@pytest.mark.parametrize(
    "content, words",
    [
        (dict(files=FILES, features=np.zeros((3, 0))), "features of 0 numbers"),
        (dict(files=FILES, features=np.zeros((2, 4))), "3 files and features .*, expected"),
        (dict(files=FILES, features=np.array([["x"] * 2] * 3)), "features .*, expected"),
        (
            dict(files=np.array(FILES, object), features=np.eye(3)),
            "Object arrays or other Python objects",
        ),
        (dict(names=FILES), "holds names; expected `files`"),
        (dict(files=np.array([b"\xff"]), features=np.eye(1)), "`files` is a ndarray, expected"),
        (dict(files=["a", "a"], features=np.eye(2)), "several rows that differ for a"),
    ],
)
def test_wrong_feature_files_are_named_without_unsafe_advice(tmp_path, content, words):
    np.savez(tmp_path / "f.npz", **content)
    with pytest.raises(ValueError, match=words) as error:
        data.read_features(tmp_path / "f.npz")
    assert "f.npz" in str(error.value) and "allow_pickle" not in str(error.value)


def test_wrong_tensor_files_are_named_without_unsafe_advice(tmp_path):
    file = tmp_path / "f.t7"
    torch.save({"files": Path("x"), "features": Counter}, file)
    with pytest.raises(ValueError, match="Object arrays or other Python objects") as error:
        data.load_tensors(file)
    assert "weights_only" not in str(error.value)
    for content in b"", b"hello", b"PK\x03\x04":
        file.write_bytes(content)
        with pytest.raises(ValueError, match="f.t7"):
            data.load_tensors(file)
    with pytest.raises(FileNotFoundError):
        data.load_tensors(tmp_path / "none.t7")
    with pytest.raises(OSError, match="no plain file"):
        data.load_tensors(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path):
    """Any bit of the stored numbers; the rest of an archive need not differ."""
    np.savez(tmp_path / "f.npz", files=FILES, features=np.eye(3))
    torch.save({"files": FILES, "features": torch.full((3, 64), 1.5)}, tmp_path / "f.t7")
    numbers = {"f.npz": np.eye(3).tobytes(), "f.t7": np.full((3, 64), 1.5, "f4").tobytes()}
    for name, stored in numbers.items():
        body = bytearray((tmp_path / name).read_bytes())
        start = body.find(stored)
        assert start > 0
        for place in range(start, start + len(stored), 37):
            body[place] ^= 4
            (tmp_path / name).write_bytes(body)
            with pytest.raises(ValueError, match=f"{name} is damaged"):
                data.read_features(tmp_path / name)
            body[place] ^= 4
        (tmp_path / name).write_bytes(body)
        assert data.read_features(tmp_path / name)["files"] == FILES


def test_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "images.csv")
    with pytest.raises(ValueError, match="images.csv is no plain file"):
        data.load(tmp_path)


# ---- splits, folders, drawings -------------------------------------------------------------------


def test_share_decides_how_many_compositions_are_unseen(tmp_path, capsys):
    # 4 and 7 have no common factor: these are all 28 pairs, 5 images each.
    pairs = [(f"s{i % 4}", f"o{i % 7}") for i in range(28 * 5)]
    for seed in range(20):
        for share, expected in (None, 6), (0.15, 4), (0.25, 7):
            split = data.divide(pairs, seed) if share is None else data.divide(pairs, seed, share)
            own = shown(pairs, split)
            for phase in "val", "test":
                assert len(own[phase] - own["train"]) == expected
    for share in 0, 0.5, -1, float("nan"):
        with pytest.raises(
            ValueError, match="a share of .*: expected more than 0 and less than 0.5"
        ):
            data.divide(pairs, 0, share)
    folder = photos(tmp_path, [f"s{i}" for i in range(4)], [f"o{i}" for i in range(7)])
    status, output = check(capsys, folder, "--make-split", "--share", "0.1")
    assert status == 0 and "share 0.1" in output
    dataset = data.load(folder)
    assert [(~dataset.seen[tuple(dataset.pairs[phase].T)]).sum() for phase in data.PHASES] == [
        0,
        3,
        3,
    ]


def test_shapes_means_the_folder_of_the_data_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "shapes", [row for row in ROWS])
    with pytest.raises(FileNotFoundError, match="python drawings.py --out root/shapes"):
        data.locate("shapes", "root")
    (tmp_path / "root/shapes").mkdir(parents=True)
    assert data.locate("shapes", "root") == Path("root/shapes") and data.locate("./shapes") == Path(
        "shapes"
    )


def test_a_wrong_folder_shows_what_is_expected_and_what_is_there(tmp_path, capsys):
    touch(tmp_path / "zappos/images/1.jpg")
    touch(tmp_path / "notes.txt")
    status, output = check(capsys, "utzappos", "--data-root", tmp_path)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert status == 2 and lines[1:] == [
        f"expected: {tmp_path}/ut-zap50k/",
        "compositional-split-natural/ (train_pairs.txt, val_pairs.txt, test_pairs.txt)",
        data.METADATA,
        "images/ (or features.npz)",
        f"found: {tmp_path}/: notes.txt, zappos/",
    ]
    status, output = check(capsys, tmp_path)
    assert status == 1 and "images.csv (image,state,object,split)" in " ".join(output.split())
    assert "zappos/" in output


def test_the_folder_given_where_its_parent_is_wanted_is_told(tmp_path, capsys):
    publish(tmp_path / "ut-zap50k")
    assert (
        f"give {tmp_path}\n" in check(capsys, "utzappos", "--data-root", tmp_path / "ut-zap50k")[1]
    )
    output = check(capsys, tmp_path)[1]
    assert (
        f"it holds ut-zap50k/: name the dataset utzappos and give --data-root {tmp_path}" in output
    )


def test_names_do_not_steer_the_terminal(tmp_path, capsys):
    rows = [*ROWS[:4], ("5\x1b[2J.jpg", "wet", "cat", "val"), *ROWS[5:]]
    output = check(capsys, publish(tmp_path / "x", rows=rows, photos=False))[1]
    assert "\x1b" not in output and "5\\x1b[2J.jpg" in output


def test_two_that_draw_at_once_both_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "IMAGES", dict(train=1, seen=0, unseen=1))
    folder, fill = tmp_path / "shapes", drawings.fill

    def second_is_first(part, seed):
        with monkeypatch.context() as patch:
            patch.setattr(drawings, "fill", fill)
            drawings.ensure(folder)
        fill(part, seed)

    monkeypatch.setattr(drawings, "fill", second_is_first)
    drawings.ensure(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]
    assert len(data.load(folder).images["train"]) == 63
    monkeypatch.setattr(drawings, "fill", fill)
    with pytest.raises(ValueError, match="is there already"):
        drawings.make(folder)


def test_what_a_killed_drawing_left_is_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "IMAGES", dict(train=1, seen=0, unseen=1))
    dead = common.part_of(tmp_path / "shapes")
    living = common.part_of(tmp_path / "shapes")
    for part in (dead, living):
        (part / "images").mkdir(parents=True)
    with common.held(living):
        drawings.ensure(tmp_path / "shapes")
    assert {path.name for path in tmp_path.iterdir()} == {"shapes", living.name}


def test_the_pictures_are_those_that_the_reports_were_made_with(tmp_path, monkeypatch):
    """Of every state, by the sum of its pixels, as drawings.py was before it was rewritten."""
    random = np.random.default_rng(0)
    sums = []
    for family, states in drawings.STATES.items():
        for state in states:
            object_ = drawings.OBJECTS.get(family, drawings.OBJECTS["toy"])[0]
            sums.append(int(np.asarray(drawings.draw(state, object_, random), np.int64).sum()))
    assert sums == [
        2130671,
        1703658,
        1829422,
        1975577,
        1841410,
        2171083,
        2165676,
        2300119,
        1886891,
        2413731,
        2302160,
        2279932,
        2102024,
        1638849,
        1760540,
    ]


# ---- one judgement with training -----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Table 1,,,\n,,,\nimage,state,object,split\nA,wet,dog,train\n",
        "\n\nimage|state|object|split\nA|wet|dog|train\n",
        'image, state, object, split\n"A", "wet", "dog", "train"\n',
        "sep=;\nimage;state;object;split\nA;wet;dog;train\n;;;\n",
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path, text):
    (tmp_path / "images.csv").write_text(text)
    problems = []
    rows = data.read_csv(tmp_path / "images.csv", problems)
    assert problems == []
    assert rows == [{"image": "A", "state": "wet", "object": "dog", "split": "train"}]


def test_a_column_that_is_there_twice_is_named(tmp_path):
    (tmp_path / "images.csv").write_text("image,state,object,split,State\nA,wet,dog,train,x\n")
    problems = []
    assert data.read_csv(tmp_path / "images.csv", problems) == []
    assert "expected one column state" in problems[0]


def test_what_cannot_be_read_is_noted_and_left_out_by_the_next_command(tmp_path, capsys):
    folder = photos(tmp_path / "x", style="{}/{}", number=8)
    check(capsys, folder, "--make-split")
    (folder / "wet/dog/0.jpg").write_bytes(b"")
    whole = io.BytesIO()
    Image.effect_noise((99, 99), 50).save(whole, "JPEG")
    (folder / "wet/dog/1.jpg").write_bytes(whole.getvalue()[:-99])
    Image.new("F", (9, 9), 4000).save(folder / "wet/dog/2.jpg", "TIFF")
    status, output = check(capsys, folder)
    assert status == 0 and "3 images that cannot be read" in output
    assert "wet/dog/0.jpg (not an image)" in output
    assert "wet/dog/1.jpg (image file is truncated" in output
    assert "wet/dog/2.jpg (floats from 4000 to 4000" in output
    assert " --skip-broken" in output.splitlines()[-1]


def test_what_is_usable_is_what_extraction_reads(tmp_path):
    folder = photos(tmp_path / "x", style="{}/{}", number=8)
    data.make_split(folder)
    content = Path(drawings.__file__).read_bytes()
    whole = io.BytesIO()
    Image.effect_noise((99, 99), 50).save(whole, "JPEG")
    contents = [content, b"", whole.getvalue()[:-99], whole.getvalue()[:700], whole.getvalue()]
    for number, content in enumerate(contents):
        (folder / f"wet/dog/{number}.jpg").write_bytes(content)
    dataset = data.load(folder)
    unreadable = data.unreadable_images(dataset)
    assert len(unreadable) == 4
    names = sum(dataset.images.values(), [])
    rows = features.extract(map(dataset.path, names), backbone="pixels", skip_broken=True)
    assert {name for name, row in zip(names, rows) if np.isnan(row).any()} == set(unreadable)

    # What a cache has features of was decoded for it, unless it has changed since.
    stamps = [data.stamp(dataset.path(name)) for name in names]
    stamps[names.index("wet/dog/2.jpg")] = 1, 1
    np.savez(folder / "features.npz", files=names, features=rows, stamps=stamps)
    assert list(data.unreadable_images(dataset)) == ["wet/dog/2.jpg"]


def test_a_set_of_which_nothing_can_be_read_is_a_problem(tmp_path, capsys):
    folder = photos(tmp_path / "x", style="{}/{}", number=8)
    data.make_split(folder)
    for name in data.load(folder).images["val"]:
        (folder / name).write_bytes(b"")
    status, output = check(capsys, folder)
    assert status == 1 and "problem: no image of the set 'val' can be read" in output


def test_a_feature_file_counts_alone_but_a_cache_only_without_photos(tmp_path, capsys):
    folder = photos(tmp_path / "x", style="{}/{}", number=8)
    check(capsys, folder, "--make-split")
    dataset = data.load(folder)
    names = sum(dataset.images.values(), [])
    features = np.ones((len(names), 3))
    file = folder / "features.npz"
    np.savez(file, files=names[1:], features=features[1:])
    assert "which alone counts" in data.missing_files(dataset)[0]
    np.savez(file, files=names[1:], features=features[1:], stamps=np.zeros((len(names) - 1, 2)))
    assert data.missing_files(dataset) == []
    features[2] = np.nan
    np.savez(file, files=names, features=features)
    assert f"features of 1 image are not finite: {names[2]}" in data.missing_files(dataset)[0]


def test_folders_whose_photos_lie_deeper_are_not_called_empty():
    text = data.what_stayed_out(["new/dog/1.jpg"], ["new/x.pdf", "old/y.pdf"])
    assert "nothing is left of old;" in text


def test_a_strip_over_the_limit_is_named_as_in_training(tmp_path):
    Image.new("1", (20_000, 10)).save(tmp_path / "strip.png")
    Image.new("1", (40_000, 10)).save(tmp_path / "long.png")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "large.png")
    wrong = data.no_photos({file.name: file for file in tmp_path.iterdir()})
    assert list(wrong) == ["long.png"]
    why = wrong["long.png"]
    assert why.startswith("40,000 x 10 pixels") and "--max-pixels" in why
    with pytest.raises(ValueError) as error:
        features.extract([tmp_path / "long.png"], backbone="pixels")
    assert why in str(error.value)


def test_sparse_features_are_read(tmp_path):
    table = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    torch.save({"files": ["a.png", "b.png"], "features": table.to_sparse()}, tmp_path / "f.t7")
    stored = data.read_features(tmp_path / "f.t7")
    assert (stored["features"] == table.numpy()).all()


@pytest.mark.parametrize("options, said", [
    (["--share", "0.1"], "--share and --seed are of --make-split, which is not given"),
    (["--seed", "0"], "--share and --seed are of --make-split, which is not given"),
    (["--make-split", "--seed", "-1"], "error: a seed of -1: expected 0 or more"),
    (["--make-split", "--share", "0"], "error: a share of 0.0: expected more than 0")])
def test_options_of_a_split_that_cannot_be(tmp_path, capsys, options, said):
    rows = [f"{n}.jpg,{state},{object_}\n" for n, (state, object_) in
            enumerate(itertools.product("abcd", "wxyz"))]
    (tmp_path / "images.csv").write_text("image,state,object\n" + "".join(rows))
    with pytest.raises(SystemExit) as end:
        data.main([str(tmp_path), *options])
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
    assert "split" not in (tmp_path / "images.csv").read_text()


def test_the_built_in_data_name_a_seed_and_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    for options, said in ((["--seed", "-1"], "a seed of -1: expected 0 or more"),
                          (["--out", str(tmp_path / "file/x")], "cannot write into ")):
        with pytest.raises(SystemExit) as end:
            drawings.main(["--out", str(tmp_path / "new"), *options])
        assert end.value.code == 2 and capsys.readouterr().err.startswith(f"error: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
